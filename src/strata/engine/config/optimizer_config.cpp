#include "strata/engine/config/optimizer_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "strata/base/error.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr std::string_view kLion = "Lion";
constexpr std::string_view kMuon = "Muon";
constexpr std::string_view k8Bit = "8bit";

// Classes of torch.optim, and Lion of strata.ops, whose update of an element needs that element's
// state alone; and Muon, of which the engine has its own.
constexpr std::array<std::string_view, 13> kElementwise{
    "Adam",  "AdamW",   "SGD",   "Adagrad", "Adadelta", "Adamax", "NAdam",
    "RAdam", "RMSprop", "Rprop", "ASGD",    kLion,      kMuon};

struct Unsupported {
  std::string_view names;  // in lower case: "muon|adafactor"
  std::string_view reason;
};
constexpr std::array<Unsupported, 8> kUnsupported{{
    {"lamb",
     "torch has no such class; an object of one, such as timm.optim.Lamb(model.parameters(), ...), "
     "may be passed as optimizer= to initialize, and gets whole parameters"},
    {"onebitlamb|onebitadam|zerooneadam", "it compresses communication"},
    {"adafactor", "pass torch.optim.Adafactor as optimizer= to initialize"},
    {"muadam|muadamw|musgd", "it needs the mup package's own groups"},
    {"lbfgs", "it needs closures and the whole gradient"},
    {"sparseadam", "it needs sparse gradients"},
    {"fusedadam", "write \"AdamW\", which is one fused pass"},
    {"deepspeedcpuadam|cpuadam", "write \"AdamW\", which runs where the shard is"},
}};

// The class of that name, however its letters are cased (DeepSpeed lowers "Adam", "AdamW",
// "Adagrad").
std::string_view class_of(const std::string& type) {
  const std::string name = lower_case(type);
  for (const std::string_view known : kElementwise) {
    if (lower_case(known) == name) return known;
  }
  for (const Unsupported& u : kUnsupported) {
    const auto names = choices_in(u.names);
    if (std::ranges::find(names, name) == names.end()) continue;
    throw RefusedFeature(
        "optimizer.type: not supported ({}); write \"AdamW\" or another elementwise class of "
        "torch.optim; found \"{}\"",
        u.reason, type);
  }
  throw ConfigError(
      "optimizer.type: wanted Adam, AdamW or an elementwise class of torch.optim (the nearest is "
      "\"{}\"); pass others as optimizer= to initialize; found \"{}\"",
      nearest_of(type, kElementwise), type);
}

std::string full_name(const std::string& torch_class) {
  if (torch_class == kMuon) return "strata.ops.muon";
  return torch_class == kLion ? "strata.ops.lion" : "torch.optim." + torch_class;
}

// The arguments of the class: all given keys but the engine's own.
json torch_arguments(const std::string& torch_class, const json& params, ConfigFindings* remarks) {
  json kept = json::object();
  for (const auto& [name, value] : params.items()) {
    if (name == "torch_adam" || name == "adam_w_mode") continue;
    if (name == "bias_correction" && torch_class.starts_with("Adam") && flag_in(value) == true)
      continue;
    // Their default is None in torch: null leaves the choice to it.
    if (value.is_null() && (name == "foreach" || name == "fused")) continue;
    const std::string path = join_path("optimizer.params", name);
    const std::string meaning = fmt::format("an argument of {}", full_name(torch_class));
    if (value == "auto") {
      const Key* key = find_key(adam_keys(), path);
      remarks->findings.push_back({path, Verdict::kOpen, shown(value), meaning});
      remarks->open.push_back(
          unresolved_auto(path, fmt::format("what {} shall get", full_name(torch_class)),
                          key == nullptr ? "0" : key->fallback));
      continue;
    }
    json argument = with_numbers(value);
    if (argument.is_string() || argument.is_null())
      throw ConfigError("optimizer.params.{}: wanted a number, true or false for {}; found {}",
                        name, full_name(torch_class), shown(value));
    remarks->findings.push_back({path, Verdict::kHonoured, shown(value), meaning});
    kept[name] = std::move(argument);
  }
  return kept;
}

constexpr std::array<std::string_view, 12> kMuonKeys{"lr",
                                                     "muon_lr",
                                                     "adam_lr",
                                                     "momentum",
                                                     "ns_method",
                                                     "weight_decay",
                                                     "betas",
                                                     "eps",
                                                     "adam_w_mode",
                                                     "torch_adam",
                                                     "fp32_optimizer_states",
                                                     "per_head_muon"};

struct OwnUpdate {
  bool decoupled = false;  // decay apart from the gradient
  bool in_kernel = false;  // of the engine, in place of the class
};

OptimizerConfig of_torch(std::string type, std::string torch_class, const json& arguments,
                         const OwnUpdate& own, Settings* settings) {
  settings->set("optimizer.torch_class", torch_class);
  settings->at("optimizer.torch_class");
  return {.type = std::move(type),
          .kind = OptimizerKind::kTorch,
          .adam = {.decoupled = own.decoupled},
          .torch_class = std::move(torch_class),
          .torch_params = canonical_text(arguments),
          .in_own_kernel = own.in_kernel};
}

// DeepSpeed's keys. AdamW updates what is no matrix, with decoupled decay and fp32 states.
OptimizerConfig muon_optimizer(std::string type, json params, Settings* settings,
                               ConfigFindings* remarks) {
  for (const auto& [name, value] : params.items()) {
    if (std::ranges::find(kMuonKeys, name) == kMuonKeys.end())
      throw ConfigError(
          "optimizer.params.{}: wanted a key of Muon: lr, muon_lr, adam_lr, momentum, ns_method, "
          "weight_decay, betas, eps or per_head_muon (the nearest is \"{}\"); found {}",
          name, nearest_of(name, kMuonKeys), shown(value));
  }
  const auto require = [&](const char* name, const auto& holds, std::string_view wanted) {
    const auto found = params.find(name);
    if (found == params.end()) return;
    if (!holds(*found))
      throw ConfigError("optimizer.params.{}: wanted {}; found {}", name, wanted, shown(*found));
    const std::string path = join_path("optimizer.params", name);
    remarks->findings.push_back({path, Verdict::kHonoured, shown(*found), "of Muon"});
    params.erase(found);
  };
  // Both names stand for the same mathematics, of which the engine has one way.
  require(
      "ns_method", [](const json& v) { return v == "gram" || v == "standard"; },
      "\"gram\" or \"standard\"");
  require(
      "adam_w_mode", [](const json& v) { return flag_in(v) == true; },
      "true: what is no matrix decays apart from its gradient");
  require(
      "torch_adam", [](const json& v) { return flag_in(v).has_value(); }, "true or false");
  require(
      "fp32_optimizer_states", [](const json& v) { return flag_in(v) == true; }, "true");
  const json arguments = torch_arguments(std::string(kMuon), params, remarks);
  return of_torch(std::move(type), std::string(kMuon), arguments, {true, true}, settings);
}

OptimizerConfig torch_optimizer(std::string type, std::string torch_class, const json& params,
                                Settings* settings, ConfigFindings* remarks) {
  const json arguments = torch_arguments(torch_class, params, remarks);
  const auto is_set = [&](const char* name) {
    return arguments.contains(name) && flag_in(arguments[name]) == true;
  };
  const bool adam = torch_class == "Adam" || torch_class == "AdamW";
  const bool special = is_set("amsgrad") || is_set("maximize") || is_set("capturable");
  const bool own = (adam && !special) || torch_class == kLion;
  const bool decoupled = torch_class == "AdamW" || is_set("decoupled_weight_decay");
  return of_torch(std::move(type), std::move(torch_class), arguments, {decoupled, own}, settings);
}

bool flag_or(const json& params, const char* name, bool fallback) {
  const Key* key = find_key(adam_keys(), std::string("optimizer.params.") + name);
  STRATA_ASSERT(key != nullptr);
  const auto found = params.find(name);
  if (found == params.end() || found->is_null() || *found == "auto") return fallback;
  return check_value(*key, *found).get<bool>();
}

// The classes of torch.optim.lr_scheduler that JSON can describe, and that look at no metric.
constexpr std::array<std::string_view, 10> kTorchClasses{
    "ConstantLR",  "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
    "CyclicLR",    "ExponentialLR",     "LinearLR",
    "MultiStepLR", "OneCycleLR",        "PolynomialLR",
    "StepLR"};

}  // namespace

void record_missing_type(const json& document, ConfigFindings* remarks) {
  const auto section = document.find("optimizer");
  if (section == document.end() || section->is_null()) return;
  const auto params = section->find("params");
  const bool has_params = params != section->end() && params->is_object() && !params->empty();
  std::string sign = has_params ? "optimizer.params" : "";
  for (const char* name : {"scheduler", "gradient_clipping", "gradient_accumulation_steps"}) {
    const auto found = document.find(name);
    if (sign.empty() && found != document.end() && !found->is_null()) sign = name;
  }
  if (sign.empty()) return;
  remarks->open.push_back(
      {"optimizer.type",
       fmt::format("optimizer.type: wanted the optimizer's class, since {} is for training; write "
                   "\"type\": \"AdamW\", pass optimizer= to initialize, or remove the section "
                   "\"optimizer\" to evaluate only; found none",
                   sign)});
}

OptimizerConfig read_optimizer(Settings* settings, ConfigFindings* remarks) {
  const std::string type = settings->text("optimizer.type");
  const json params = settings->at("optimizer.params");
  const bool in_8_bits = lower_case(type).ends_with(k8Bit);
  const std::string_view name =
      class_of(in_8_bits ? type.substr(0, type.size() - k8Bit.size()) : type);
  const auto with_bits = [in_8_bits](OptimizerConfig config) {
    config.in_8_bits = in_8_bits;
    return config;
  };
  if (in_8_bits && name != "Adam" && name != "AdamW" && name != kLion)
    throw ConfigError(
        "optimizer.type: states in 8 bits are for AdamW8bit, Adam8bit and Lion8bit; write one of "
        "these, or \"{}\"; found \"{}\"",
        name, type);
  if (const auto norm = params.find("max_grad_norm"); norm != params.end())
    throw ConfigError(
        fmt::format("optimizer.params.max_grad_norm: clipping is no parameter of the optimizer; "
                    "write \"gradient_clipping\": {0} at the top level; found {0}",
                    shown(*norm)));
  if (name == kMuon) return muon_optimizer(type, params, settings, remarks);
  if (name != "Adam" && name != "AdamW")
    return with_bits(torch_optimizer(type, std::string(name), params, settings, remarks));
  const bool decoupled = name == "AdamW" || flag_or(params, "adam_w_mode", true);
  if (flag_or(params, "torch_adam", false)) {
    if (!flag_or(params, "bias_correction", true))
      throw ConfigError(
          "optimizer.params.bias_correction: torch.optim's Adam always corrects; remove "
          "\"torch_adam\", by which the engine's kernel does without, or write true; found false");
    return with_bits(
        torch_optimizer(type, decoupled ? "AdamW" : "Adam", params, settings, remarks));
  }
  settings->set("optimizer.params",
                json::object());  // each parameter has its own path from here on
  read_settings(adam_keys(), params, "optimizer.params", settings, remarks);
  settings->at("optimizer.params.torch_adam");
  settings->set("optimizer.params.adam_w_mode", decoupled);
  const json& betas = settings->at("optimizer.params.betas");
  return {.type = type,
          .kind = OptimizerKind::kAdam,
          .adam = {.lr = settings->number("optimizer.params.lr"),
                   .beta1 = betas.at(0).get<double>(),
                   .beta2 = betas.at(1).get<double>(),
                   .eps = settings->number("optimizer.params.eps"),
                   .weight_decay = settings->number("optimizer.params.weight_decay"),
                   .bias_correction = settings->flag("optimizer.params.bias_correction"),
                   .decoupled = settings->flag("optimizer.params.adam_w_mode")},
          .torch_class = {},
          .torch_params = "{}",
          .in_8_bits = in_8_bits};
}

bool has_states_8bit(const Settings& settings, const std::optional<OptimizerConfig>& optimizer) {
  const auto states = settings.maybe<std::string>("strata.optimizer_states");
  const bool by_type = optimizer && optimizer->in_8_bits;
  if (states == "32bit" && by_type)
    throw ConfigError(
        "strata.optimizer_states: contradicts optimizer.type \"{}\"; remove the key, or write "
        "\"8bit\"; found \"32bit\"",
        optimizer->type);
  if (states != "8bit" && !by_type) return false;
  if (optimizer && !optimizer->in_own_kernel)
    throw ConfigError(
        "{}: states in 8 bits are for Adam, AdamW and Lion without amsgrad, maximize or "
        "capturable; write \"32bit\", or another optimizer.type; found \"8bit\" and \"{}\"",
        by_type ? "optimizer.type" : "strata.optimizer_states", optimizer->type);
  if (settings.flag("bf16.bf16_optimizer_states"))
    throw ConfigError(
        "bf16.bf16_optimizer_states: contradicts states in 8 bits (optimizer.type, "
        "strata.optimizer_states); write false, or take states in 32 bits; found true");
  return true;
}

std::optional<TorchSchedulerConfig> read_torch_scheduler(Settings* settings,
                                                         ConfigFindings* remarks) {
  const std::string type = settings->text("scheduler.type");
  if (std::ranges::find(kTorchClasses, type) == kTorchClasses.end()) return std::nullopt;
  const json params = settings->at("scheduler.params");
  const std::string meaning = fmt::format("an argument of torch.optim.lr_scheduler.{}", type);
  json kept = json::object();
  for (const auto& [name, value] : params.items()) {
    const std::string path = join_path("scheduler.params", name);
    const bool open = value == "auto";
    remarks->findings.push_back(
        {path, open ? Verdict::kOpen : Verdict::kHonoured, shown(value), meaning});
    if (open) remarks->open.push_back(unresolved_auto(path, meaning, "1000"));
    if (!open && !value.is_null()) kept[name] = with_numbers(value);
  }
  return TorchSchedulerConfig{type, canonical_text(kept)};
}

std::optional<SchedulerConfig> read_scheduler(Settings* settings, ConfigFindings* remarks) {
  const std::string type = settings->text("scheduler.type");
  const json params = settings->at("scheduler.params");
  const auto keys = scheduler_keys(type);
  if (keys.empty())
    throw ConfigError(
        "scheduler.type: wanted WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest "
        "(the nearest is \"{}\"); pass a scheduler of torch.optim as lr_scheduler= to initialize; "
        "found \"{}\"",
        nearest_of(type, kSchedulerTypes), type);
  settings->set("scheduler.params",
                json::object());  // each parameter has its own path from here on
  read_settings(keys, params, "scheduler.params", settings, remarks);
  const bool open = std::ranges::any_of(remarks->open, [](const OpenSetting& setting) {
    return parent_of(setting.path) == "scheduler.params";
  });
  if (open) {
    for (const Key& key : keys) settings->at(key.path);
    return std::nullopt;
  }
  json values = json::object();
  for (const Key& key : keys) {
    const json& value = values[std::string(leaf_of(key.path))] = settings->at(key.path);
    if (key.meaning.ends_with("; required") && value.is_null())
      throw ConfigError("{}: {} needs {} ({}); found none", key.path, type, wanted(key),
                        key.meaning);
  }
  return SchedulerConfig{
      .params = {type, canonical_text(values)},
      .last_iteration = settings->integer("scheduler.params.last_batch_iteration")};
}

}  // namespace strata::engine
