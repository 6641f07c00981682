#include "strata/engine/config/scheduler_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/engine/config/json_text.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/nearest.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

// The classes of torch.optim.lr_scheduler that JSON can describe, and that look at no metric.
constexpr std::array<std::string_view, 10> kTorchClasses{
    "ConstantLR",  "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
    "CyclicLR",    "ExponentialLR",     "LinearLR",
    "MultiStepLR", "OneCycleLR",        "PolynomialLR",
    "StepLR"};

// Typed access to the parameters of one scheduler.
class Params {
 public:
  Params(const Settings& settings, std::string type)
      : settings_(settings), type_(std::move(type)) {}

  double number(std::string_view name) const { return settings_.number(path(name)); }
  std::int64_t integer(std::string_view name) const { return settings_.integer(path(name)); }
  bool flag(std::string_view name) const { return settings_.flag(path(name)); }
  template <typename T>
  std::optional<T> maybe(std::string_view name) const {
    return settings_.maybe<T>(path(name));
  }

  std::optional<PerGroup> maybe_per_group(std::string_view name) const {
    const json& value = settings_.at(path(name));
    if (value.is_null()) return std::nullopt;
    return value.is_array() ? PerGroup::each(value.get<std::vector<double>>())
                            : PerGroup::all(value.get<double>());
  }
  PerGroup per_group(std::string_view name) const { return required(name, maybe_per_group(name)); }
  std::int64_t required_integer(std::string_view name) const {
    return required(name, maybe<std::int64_t>(name));
  }
  WarmupShape shape() const {
    return settings_.text(path("warmup_type")) == "log" ? WarmupShape::kLog : WarmupShape::kLinear;
  }

 private:
  static std::string path(std::string_view name) { return join_path("scheduler.params", name); }

  template <typename T>
  T required(std::string_view name, std::optional<T> value) const {
    if (value) return *std::move(value);
    const Key* key = find_key(scheduler_keys(type_), path(name));
    throw ConfigError(fmt::format("{}: {} needs {} ({}); found none", path(name), type_,
                                  wanted(*key), key->meaning));
  }

  const Settings& settings_;
  std::string type_;
};

WarmupLrParams warmup_of(const Params& p) {
  return {.min_lr = p.per_group("warmup_min_lr"),
          .max_lr = p.maybe_per_group("warmup_max_lr"),
          .warmup_steps = p.integer("warmup_num_steps"),
          .shape = p.shape()};
}

WarmupCosineLrParams cosine_of(const Params& p) {
  return {.total_steps = p.required_integer("total_num_steps"),
          .min_ratio = p.number("warmup_min_ratio"),
          .warmup_steps = p.integer("warmup_num_steps"),
          .cos_min_ratio = p.number("cos_min_ratio"),
          .shape = p.shape()};
}

OneCycleParams one_cycle_of(const Params& p) {
  return {.min_lr = p.per_group("cycle_min_lr"),
          .max_lr = p.per_group("cycle_max_lr"),
          .decay_lr_rate = p.number("decay_lr_rate"),
          .first_step_size = p.number("cycle_first_step_size"),
          .second_step_size = p.maybe<double>("cycle_second_step_size"),
          .first_stair_count = p.integer("cycle_first_stair_count"),
          .second_stair_count = p.maybe<std::int64_t>("cycle_second_stair_count"),
          .decay_step_size = p.number("decay_step_size"),
          .cycle_momentum = p.flag("cycle_momentum"),
          .min_momentum = p.per_group("cycle_min_mom"),
          .max_momentum = p.per_group("cycle_max_mom"),
          .decay_momentum_rate = p.number("decay_mom_rate")};
}

LrRangeTestParams range_test_of(const Params& p) {
  return {.min_lr = p.per_group("lr_range_test_min_lr"),
          .step_size = p.integer("lr_range_test_step_size"),
          .step_rate = p.number("lr_range_test_step_rate"),
          .staircase = p.flag("lr_range_test_staircase")};
}

ScheduleParams params_of(const std::string& type, const Params& p) {
  if (type == "WarmupLR") return warmup_of(p);
  if (type == "WarmupDecayLR") {
    return WarmupDecayLrParams{.total_steps = p.required_integer("total_num_steps"),
                               .warmup = warmup_of(p)};
  }
  if (type == "WarmupCosineLR") return cosine_of(p);
  if (type == "OneCycle") return one_cycle_of(p);
  STRATA_ASSERT(type == "LRRangeTest");
  return range_test_of(p);
}

}  // namespace

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
  if (keys.empty()) {
    throw ConfigError(fmt::format(
        "scheduler.type: wanted WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest "
        "(the "
        "nearest is \"{}\"); pass a scheduler of torch.optim as lr_scheduler= to initialize; found "
        "\"{}\"",
        nearest_of(type, scheduler_types()), type));
  }
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
  const Params typed(*settings, type);
  return SchedulerConfig{.type = type,
                         .params = params_of(type, typed),
                         .last_iteration = typed.integer("last_batch_iteration")};
}

}  // namespace strata::engine
