#include "strata/engine/config/offload_config.h"

#include <fmt/core.h>

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
constexpr std::string_view kMaxInCpu = "zero_optimization.offload_param.max_in_cpu";
constexpr std::string_view kBlockSize = "aio.block_size";
constexpr std::string_view kQueueDepth = "aio.queue_depth";
constexpr std::string_view kParallelism = "aio.intra_op_parallelism";
constexpr std::string_view kVerify = "strata.verify_drives";
constexpr std::string_view kDeviceBudget = "strata.device_budget";
constexpr std::string_view kHostBudget = "strata.host_budget";

// Numbers beyond any machine's memory are a budget without a bound.
Numel elements_of(std::int64_t count, std::int64_t elements) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 16;
  const double product = static_cast<double>(count) * static_cast<double>(elements);
  if (product > static_cast<double>(kLargest)) return Numel(kLargest);
  return Numel(count * elements);
}

std::vector<std::string> folders_in(const Settings& settings, std::string_view key) {
  return settings.maybe<std::vector<std::string>>(key).value_or(std::vector<std::string>());
}

// Empty where nothing goes to a drive.
std::vector<std::string> folders_for(bool on_drive, const Settings& settings, std::string_view key,
                                     std::string_view what) {
  auto folders = folders_in(settings, key);
  if (!on_drive) return {};
  if (!folders.empty() && std::ranges::find(folders, "") == folders.end()) return folders;
  throw ConfigError(fmt::format(
      "{}: wanted the path of a folder on the drive that the {} go to, or a list of such; found {}",
      key, what, folders.empty() ? "none" : "an empty one"));
}

io::EngineOptions io_options(const Settings& settings) {
  constexpr std::int64_t kDepthMax = 4096;
  constexpr std::int64_t kThreadsMax = 64;
  const std::int64_t depth = std::min(settings.integer(kQueueDepth), kDepthMax);
  const std::int64_t all = std::min(settings.integer(kParallelism), kDepthMax) * depth;
  io::EngineOptions options;
  options.piece =
      align_up(std::min(Bytes(settings.integer(kBlockSize)), 1_GiB), io::File::kDirectBlock);
  options.depth = static_cast<int>(std::min(all, kDepthMax));
  options.threads = static_cast<int>(std::min(all, kThreadsMax));
  return options;
}

bool names(memory::Tier first, const std::vector<memory::Tier>& others, memory::Tier wanted) {
  return first == wanted || std::ranges::find(others, wanted) != others.end();
}

Numel param_staging(const Settings& settings) {
  return elements_of(settings.integer(kParamCount), settings.integer(kParamSize)) +
         elements_of(1, settings.integer(kMaxInCpu));
}

// The device that `key` names, where the stage shards what lies there.
memory::Tier tier_at(const Settings& settings, std::string_view key, bool sharded, int stage,
                     std::string_view advice, ConfigFindings* remarks) {
  const memory::Tier tier = tier_named(settings.text(key));
  if (sharded || tier == memory::Tier::kDevice) return tier;
  remarks->hints.push_back(
      {std::string(key),
       fmt::format("{}, and nothing is offloaded at stage {}; write \"none\", or that stage",
                   advice, stage),
       true});
  return memory::Tier::kDevice;
}

void require_sharded(bool sharded, std::string_view what, std::string_view stages, int stage) {
  if (sharded) return;
  throw ConfigError(fmt::format(
      "strata.placement: {} that are offloaded are sharded ones: wanted zero_optimization.stage "
      "{}, or \"device\"; found stage {}",
      what, stages, stage));
}

void read_param(const Settings& settings, int stage, OffloadConfig& config,
                ConfigFindings* remarks) {
  config.param = tier_at(settings, kParamDevice, stage == 3, stage,
                         "weights are sharded at stage 3 alone", remarks);
  config.param_staging = param_staging(settings);
  config.param_folders = folders_for(names(config.param, config.param_tiers(), memory::Tier::kNvme),
                                     settings, kParamFolder, "weights");
  require_sharded(!config.offloads_params() || stage == 3, "weights", "3", stage);
}

std::optional<Bytes> bytes_at(const Settings& settings, std::string_view key) {
  const auto value = settings.maybe<std::int64_t>(key);
  return value ? std::optional(Bytes(*value)) : std::nullopt;
}

// Devices and share have no effect; a folder for one of the two serves both, an empty text is none.
OffloadConfig read_automatic(const Settings& settings, int stage, OffloadConfig config) {
  config.optimizer = memory::Tier::kDevice;
  config.ratio = 1.0;
  settings.at(kParamDevice);
  config.places_weights = stage == 3;
  config.param_staging = param_staging(settings);
  config.param_folders = folders_in(settings, kParamFolder);
  config.optimizer_folders = folders_in(settings, kOptimizerFolder);
  std::erase(config.param_folders, "");
  std::erase(config.optimizer_folders, "");
  if (config.param_folders.empty()) config.param_folders = config.optimizer_folders;
  if (config.optimizer_folders.empty()) config.optimizer_folders = config.param_folders;
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

OffloadConfig read_offload(const Settings& settings, int stage, ConfigFindings* remarks) {
  OffloadConfig config;
  const Numel elements = elements_of(settings.integer(kBufferCount), settings.integer(kBufferSize));
  config.staging = bytes_of(elements, DType::kFloat32);
  config.ratio = settings.number(kRatio);
  config.io = io_options(settings);
  config.verify = settings.flag(kVerify);
  config.rules = read_placement(settings);
  config.automatic = places_automatically(settings);
  config.device_budget = bytes_at(settings, kDeviceBudget);
  config.host_budget = bytes_at(settings, kHostBudget);
  settings.at(kOptimizerDevice);
  if (config.automatic) return read_automatic(settings, stage, std::move(config));
  config.optimizer = tier_at(settings, kOptimizerDevice, stage >= 1, stage,
                             "optimizer states are sharded from stage 1 on", remarks);
  read_param(settings, stage, config, remarks);
  const std::vector<memory::Tier> tiers = config.optimizer_tiers();
  const auto has = [&](memory::Tier tier) { return names(config.optimizer, tiers, tier); };
  config.optimizer_folders =
      folders_for(has(memory::Tier::kNvme), settings, kOptimizerFolder, "states");
  require_sharded(!(has(memory::Tier::kHost) || has(memory::Tier::kNvme)) || stage >= 1, "states",
                  "1, 2 or 3", stage);
  return config;
}

}  // namespace strata::engine
