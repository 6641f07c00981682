#include "strata/engine/config/offload_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/engine/config/settings.h"

namespace strata::engine {
namespace {

constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kOptimizerFolder = "zero_optimization.offload_optimizer.nvme_path";
constexpr std::string_view kBufferCount = "zero_optimization.offload_optimizer.buffer_count";
constexpr std::string_view kBufferSize = "zero_optimization.offload_optimizer.buffer_size";
constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";
constexpr std::string_view kParamDevice = "zero_optimization.offload_param.device";
constexpr std::string_view kParamFolder = "zero_optimization.offload_param.nvme_path";
constexpr std::string_view kParamCount = "zero_optimization.offload_param.buffer_count";
constexpr std::string_view kParamSize = "zero_optimization.offload_param.buffer_size";
constexpr std::string_view kDeviceBudget = "strata.device_budget";
constexpr std::string_view kHostBudget = "strata.host_budget";

// Numbers that nobody has memory for are a budget without a bound.
Numel elements_of(std::int64_t count, std::int64_t elements) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 16;
  const double product = static_cast<double>(count) * static_cast<double>(elements);
  if (product > static_cast<double>(kLargest)) return Numel(kLargest);
  return Numel(count * elements);
}

// Empty where nothing goes to a drive.
std::string folder_for(bool on_drive, const Settings& settings, std::string_view key,
                       std::string_view what) {
  const auto folder = settings.maybe<std::string>(key);
  if (!on_drive) return "";
  if (folder && !folder->empty()) return *folder;
  throw ConfigError(fmt::format(
      "{}: wanted the path of a folder on the drive that the {} go to; found none", key, what));
}

bool names(memory::Tier first, const std::vector<memory::Tier>& others, memory::Tier wanted) {
  return first == wanted || std::ranges::find(others, wanted) != others.end();
}

void read_param(const Settings& settings, int stage, OffloadConfig& config) {
  config.param = tier_named(settings.text(kParamDevice));
  config.param_staging = elements_of(settings.integer(kParamCount), settings.integer(kParamSize));
  config.param_folder = folder_for(names(config.param, config.param_tiers(), memory::Tier::kNvme),
                                   settings, kParamFolder, "weights");
  if (config.offloads_params() && stage != 3) {
    throw ConfigError(fmt::format(
        "{}: weights that are offloaded are sharded ones: wanted zero_optimization.stage 3, or "
        "device \"none\"; found stage {}",
        kParamDevice, stage));
  }
}

std::optional<Bytes> bytes_at(const Settings& settings, std::string_view key) {
  const auto value = settings.maybe<std::int64_t>(key);
  return value ? std::optional(Bytes(*value)) : std::nullopt;
}

// Devices and share have no effect; a folder for one of the two serves both.
OffloadConfig read_automatic(const Settings& settings, int stage, OffloadConfig config) {
  config.optimizer = memory::Tier::kDevice;
  config.ratio = 1.0;
  settings.at(kParamDevice);
  config.places_weights = stage == 3;
  config.param_staging = elements_of(settings.integer(kParamCount), settings.integer(kParamSize));
  config.param_folder = settings.maybe<std::string>(kParamFolder).value_or("");
  config.optimizer_folder = settings.maybe<std::string>(kOptimizerFolder).value_or("");
  if (config.param_folder.empty()) config.param_folder = config.optimizer_folder;
  if (config.optimizer_folder.empty()) config.optimizer_folder = config.param_folder;
  return config;
}

}  // namespace

std::vector<memory::Tier> OffloadConfig::param_tiers() const {
  std::vector<memory::Tier> tiers;
  for (const PlacementRule& rule : rules) {
    if (rule.param) tiers.push_back(*rule.param);
  }
  return tiers;
}

std::vector<memory::Tier> OffloadConfig::optimizer_tiers() const {
  std::vector<memory::Tier> tiers;
  for (const PlacementRule& rule : rules) {
    if (rule.optimizer) tiers.push_back(*rule.optimizer);
  }
  if (ratio < 1.0) tiers.push_back(memory::Tier::kDevice);
  return tiers;
}

bool OffloadConfig::offloads_params() const {
  if (automatic) return places_weights;
  const std::vector<memory::Tier> tiers = param_tiers();
  return names(param, tiers, memory::Tier::kHost) || names(param, tiers, memory::Tier::kNvme);
}

OffloadConfig read_offload(const Settings& settings, int stage) {
  OffloadConfig config;
  const std::string device = settings.text(kOptimizerDevice);
  config.optimizer = tier_named(device);
  const Numel elements = elements_of(settings.integer(kBufferCount), settings.integer(kBufferSize));
  config.staging = bytes_of(elements, DType::kFloat32);
  config.ratio = settings.number(kRatio);
  config.rules = read_placement(settings);
  config.automatic = places_automatically(settings);
  config.device_budget = bytes_at(settings, kDeviceBudget);
  config.host_budget = bytes_at(settings, kHostBudget);
  if (config.automatic) return read_automatic(settings, stage, std::move(config));
  read_param(settings, stage, config);
  const std::vector<memory::Tier> tiers = config.optimizer_tiers();
  const auto has = [&](memory::Tier tier) { return names(config.optimizer, tiers, tier); };
  config.optimizer_folder =
      folder_for(has(memory::Tier::kNvme), settings, kOptimizerFolder, "states");
  if ((has(memory::Tier::kHost) || has(memory::Tier::kNvme)) && stage < 1) {
    throw ConfigError(fmt::format(
        "{}: states that are offloaded are sharded ones: wanted zero_optimization.stage 1, 2 or 3, "
        "or device \"none\"; found stage {}",
        kOptimizerDevice, stage));
  }
  return config;
}

}  // namespace strata::engine
