#include "strata/engine/config/offload_config.h"

#include <fmt/core.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr std::string_view kParam = "zero_optimization.offload_param";
constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer";
// "none" or "device", "cpu" or "host", "nvme".
memory::Tier tier_named(std::string_view device) {
  if (device == "cpu" || device == "host") return memory::Tier::kHost;
  return device == "nvme" ? memory::Tier::kNvme : memory::Tier::kDevice;
}

// Numbers beyond any machine's memory are a budget without a bound.
Numel elements_of(std::int64_t count, std::int64_t elements) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 16;
  const double product = static_cast<double>(count) * static_cast<double>(elements);
  return Numel(product > static_cast<double>(kLargest) ? kLargest : count * elements);
}

// buffer_count x buffer_size of a section.
Numel staging_of(const Settings& settings, std::string_view section) {
  return elements_of(settings.integer(join_path(section, "buffer_count")),
                     settings.integer(join_path(section, "buffer_size")));
}

std::vector<std::string> folders_in(const Settings& settings, std::string_view section) {
  return settings.maybe<std::vector<std::string>>(join_path(section, "nvme_path"))
      .value_or(std::vector<std::string>());
}

// Empty where nothing goes to a drive.
std::vector<std::string> folders_for(bool on_drive, const Settings& settings,
                                     std::string_view section, std::string_view what) {
  auto folders = folders_in(settings, section);
  if (!on_drive) return {};
  if (!folders.empty() && std::ranges::find(folders, "") == folders.end()) return folders;
  throw ConfigError(
      "{}.nvme_path: wanted the path of a folder on the drive that the {} go to, or a list of "
      "such; found {}",
      section, what, folders.empty() ? "none" : "an empty one");
}

io::EngineOptions io_options(const Settings& settings) {
  constexpr std::int64_t kDepthMax = 4096;
  constexpr std::int64_t kThreadsMax = 64;
  const std::int64_t depth = std::min(settings.integer("aio.queue_depth"), kDepthMax);
  const std::int64_t all =
      std::min(settings.integer("aio.intra_op_parallelism"), kDepthMax) * depth;
  io::EngineOptions options;
  options.piece =
      align_up(std::min(Bytes(settings.integer("aio.block_size")), 1_GiB), io::File::kDirectBlock);
  options.depth = static_cast<int>(std::min(all, kDepthMax));
  options.threads = static_cast<int>(std::min(all, kThreadsMax));
  return options;
}

bool names(memory::Tier first, const std::vector<memory::Tier>& others, memory::Tier wanted) {
  return first == wanted || std::ranges::find(others, wanted) != others.end();
}

// The device of a section, where the stage shards what lies there.
memory::Tier tier_at(const Settings& settings, std::string_view section, bool sharded, int stage,
                     std::string_view advice, ConfigFindings* remarks) {
  const std::string key = join_path(section, "device");
  const memory::Tier tier = tier_named(settings.text(key));
  if (sharded || tier == memory::Tier::kDevice) return tier;
  remarks->hints.push_back(
      {key,
       fmt::format("{}, and nothing is offloaded at stage {}; write \"none\", or that stage",
                   advice, stage),
       true});
  return memory::Tier::kDevice;
}

void require_sharded(bool sharded, std::string_view what, std::string_view stages, int stage) {
  if (sharded) return;
  throw ConfigError(
      "strata.placement: {} that are offloaded are sharded ones: wanted zero_optimization.stage "
      "{}, or \"device\"; found stage {}",
      what, stages, stage);
}

void read_param(const Settings& settings, int stage, OffloadConfig& config,
                ConfigFindings* remarks) {
  config.param =
      tier_at(settings, kParam, stage == 3, stage, "weights are sharded at stage 3 alone", remarks);
  config.param_folders = folders_for(names(config.param, config.param_tiers(), memory::Tier::kNvme),
                                     settings, kParam, "weights");
  require_sharded(!config.offloads_params() || stage == 3, "weights", "3", stage);
}

// Devices and share have no effect; a folder for one of the two serves both, an empty text is none.
OffloadConfig read_automatic(const Settings& settings, int stage, OffloadConfig config) {
  config.optimizer = memory::Tier::kDevice;
  config.ratio = 1.0;
  config.places_weights = stage == 3;
  config.param_folders = folders_in(settings, kParam);
  config.optimizer_folders = folders_in(settings, kOptimizer);
  std::erase(config.param_folders, "");
  std::erase(config.optimizer_folders, "");
  if (config.param_folders.empty()) config.param_folders = config.optimizer_folders;
  if (config.optimizer_folders.empty()) config.optimizer_folders = config.param_folders;
  return config;
}

constexpr std::string_view kPlacement = "strata.placement";

[[noreturn]] void refuse_rule(std::size_t index, std::string_view key, std::string_view wanted,
                              const json& found) {
  throw ConfigError("{}[{}]{}{}: wanted {}; found {}", kPlacement, index, key.empty() ? "" : ".",
                    key, wanted, shown(found));
}

memory::Tier place_in(std::size_t index, std::string_view key, const json& value) {
  constexpr std::array<std::string_view, 5> kPlaces{"device", "host", "nvme", "none", "cpu"};
  if (!value.is_string() || std::ranges::find(kPlaces, value.get<std::string>()) == kPlaces.end())
    refuse_rule(index, key, "one of device, host, nvme", value);
  return tier_named(value.get<std::string>());
}

Bytes size_in(std::size_t index, std::string_view key, const json& value) {
  std::optional<double> bytes;
  if (value.is_number()) bytes = value.get<double>();
  if (value.is_string()) bytes = parse_size(value.get<std::string>(), SizeText::kExact);
  if (!bytes || *bytes < 0)
    refuse_rule(index, key, "bytes as a number or text like \"200MB\"", value);
  return Bytes(clamped(*bytes));
}

PlacementRule rule_of(std::size_t index, const json& object) {
  PlacementRule rule;
  bool names = false;
  for (const auto& [key, value] : object.items()) {
    if (key == "match") {
      if (!value.is_string()) refuse_rule(index, key, "a pattern of names", value);
      rule.match = value.get<std::string>();
      names = true;
    } else if (key == "larger_than") {
      rule.larger_than = size_in(index, key, value);
      names = true;
    } else if (key == "param") {
      rule.param = place_in(index, key, value);
    } else if (key == "optimizer") {
      rule.optimizer = place_in(index, key, value);
    } else {
      refuse_rule(index, "", "the keys match, larger_than, param, optimizer", key);
    }
  }
  if (!names) refuse_rule(index, "", "match or larger_than, which say what is placed", object);
  if (!rule.param && !rule.optimizer)
    refuse_rule(index, "", "param or optimizer, which say where it is placed", object);
  return rule;
}

bool names(const PlacementRule& rule, const plan::ParamSpec& param) {
  return fnmatch(rule.match.c_str(), param.name.c_str(), 0) == 0 &&
         bytes_of(param.numel(), param.dtype) > rule.larger_than;
}

// The last parameters, of which all but `ratio` of the elements stay on the device.
void keep_share(std::vector<plan::ParamSpec>& params, double ratio) {
  Numel all;
  for (const plan::ParamSpec& param : params) all += param.trainable ? param.numel() : Numel();
  Numel seen;
  for (plan::ParamSpec& param : params) {
    if (!param.trainable) continue;
    // A parameter goes with its middle, so that the share is missed by half of one at most.
    const Numel middle = seen + Numel(param.numel().value / 2);
    seen += param.numel();
    const bool offloads =
        static_cast<double>((all - middle).value) < ratio * static_cast<double>(all.value);
    if (!offloads && !param.place.states) param.place.states = memory::Tier::kDevice;
  }
}

std::string text_of(const PlacementRule& rule) {
  std::string text = rule.match;
  if (rule.larger_than.value >= 0) text += fmt::format(" over {}", to_string(rule.larger_than));
  if (rule.param) text += fmt::format(": weights on {}", memory::name_of(*rule.param));
  if (rule.optimizer)
    text +=
        fmt::format("{} states on {}", rule.param ? "," : ":", memory::name_of(*rule.optimizer));
  return text;
}

std::vector<memory::Tier> tiers_of(const std::vector<PlacementRule>& rules,
                                   std::optional<memory::Tier> PlacementRule::*place) {
  std::vector<memory::Tier> tiers;
  for (const PlacementRule& rule : rules) {
    if (rule.*place) tiers.push_back(*(rule.*place));
  }
  return tiers;
}

}  // namespace

std::vector<memory::Tier> OffloadConfig::param_tiers() const {
  return tiers_of(rules, &PlacementRule::param);
}

std::vector<memory::Tier> OffloadConfig::optimizer_tiers() const {
  std::vector<memory::Tier> tiers = tiers_of(rules, &PlacementRule::optimizer);
  if (ratio < 1.0) tiers.push_back(memory::Tier::kDevice);
  return tiers;
}

bool OffloadConfig::offloads_params() const {
  if (automatic) return places_weights;
  const std::vector<memory::Tier> tiers = param_tiers();
  return names(param, tiers, memory::Tier::kHost) || names(param, tiers, memory::Tier::kNvme);
}

OffloadConfig read_offload(const Settings& settings, int stage, ConfigFindings* remarks) {
  OffloadConfig config;
  config.staging = bytes_of(staging_of(settings, kOptimizer), DType::kFloat32);
  settings.read(join_path(kOptimizer, "ratio"), config.ratio);
  config.io = io_options(settings);
  settings.read("strata.verify_drives", config.verify);
  settings.read("strata.staging", config.staging_in_all);
  settings.read("strata.device_budget", config.device_budget);
  settings.read("strata.host_budget", config.host_budget);
  config.param_staging = staging_of(settings, kParam) +
                         elements_of(1, settings.integer(join_path(kParam, "max_in_cpu")));
  const json& placement = settings.at(kPlacement);
  config.automatic = placement == "auto";
  for (const std::string_view section : {kParam, kOptimizer})
    settings.at(join_path(section, "device"));  // read, also where it has no effect
  if (config.automatic) return read_automatic(settings, stage, std::move(config));
  for (const json& object : placement) config.rules.push_back(rule_of(config.rules.size(), object));
  config.optimizer = tier_at(settings, kOptimizer, stage >= 1, stage,
                             "optimizer states are sharded from stage 1 on", remarks);
  read_param(settings, stage, config, remarks);
  const std::vector<memory::Tier> tiers = config.optimizer_tiers();
  const auto has = [&](memory::Tier tier) { return names(config.optimizer, tiers, tier); };
  config.optimizer_folders = folders_for(has(memory::Tier::kNvme), settings, kOptimizer, "states");
  require_sharded(!(has(memory::Tier::kHost) || has(memory::Tier::kNvme)) || stage >= 1, "states",
                  "1, 2 or 3", stage);
  return config;
}

void place_params(std::vector<plan::ParamSpec>& params, const OffloadConfig& offload) {
  for (plan::ParamSpec& param : params) {
    for (const PlacementRule& rule : offload.rules) {
      if (!names(rule, param)) continue;
      if (!param.place.weights) param.place.weights = rule.param;
      if (!param.place.states && param.trainable) param.place.states = rule.optimizer;
    }
  }
  if (offload.optimizer != memory::Tier::kDevice && offload.ratio < 1.0)
    keep_share(params, offload.ratio);
}

std::vector<RuleUse> rule_uses(const std::vector<plan::ParamSpec>& params,
                               const OffloadConfig& offload) {
  std::vector<RuleUse> uses;
  for (const PlacementRule& rule : offload.rules) uses.push_back({text_of(rule), 0, Bytes()});
  for (const plan::ParamSpec& param : params) {
    bool weights = false;
    bool states = !param.trainable;
    for (std::size_t r = 0; r < uses.size(); ++r) {
      const PlacementRule& rule = offload.rules[r];
      if (!names(rule, param)) continue;
      const bool places = (rule.param && !weights) || (rule.optimizer && !states);
      weights = weights || rule.param;
      states = states || rule.optimizer;
      if (!places) continue;
      ++uses[r].params;
      uses[r].bytes += bytes_of(param.numel(), param.dtype);
    }
  }
  return uses;
}

}  // namespace strata::engine
