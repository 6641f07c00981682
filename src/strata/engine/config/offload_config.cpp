#include "strata/engine/config/offload_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/engine/config/settings.h"

namespace strata::engine {
namespace {

// With less a part of a unit's states does not always fit.
constexpr Bytes kLeastStaging = 1_MiB;

constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kOptimizerFolder = "zero_optimization.offload_optimizer.nvme_path";
constexpr std::string_view kBufferCount = "zero_optimization.offload_optimizer.buffer_count";
constexpr std::string_view kBufferSize = "zero_optimization.offload_optimizer.buffer_size";

memory::Tier tier_of(std::string_view device) {
  if (device == "cpu") return memory::Tier::kHost;
  return device == "nvme" ? memory::Tier::kNvme : memory::Tier::kDevice;
}

// Numbers that nobody has memory for are a budget without a bound.
Bytes budget_of(std::int64_t count, std::int64_t elements) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 16;
  const double product = static_cast<double>(count) * static_cast<double>(elements);
  if (product > static_cast<double>(kLargest)) return bytes_of(Numel(kLargest), DType::kFloat32);
  return bytes_of(Numel(count * elements), DType::kFloat32);
}

}  // namespace

OffloadConfig read_offload(const Settings& settings, int stage) {
  OffloadConfig config;
  const std::string device = settings.text(kOptimizerDevice);
  const auto folder = settings.maybe<std::string>(kOptimizerFolder);
  config.optimizer = tier_of(device);
  config.staging = std::max(
      kLeastStaging, budget_of(settings.integer(kBufferCount), settings.integer(kBufferSize)));
  if (config.optimizer == memory::Tier::kDevice) return config;
  if (stage < 1) {
    throw ConfigError(fmt::format(
        "{}: states that are offloaded are sharded ones: wanted zero_optimization.stage 1, 2 or 3, "
        "or device \"none\"; found stage {}",
        kOptimizerDevice, stage));
  }
  if (config.optimizer != memory::Tier::kNvme) return config;
  if (!folder || folder->empty()) {
    throw ConfigError(fmt::format(
        "{}: wanted the path of a folder on the drive that the states go to; found none",
        kOptimizerFolder));
  }
  config.optimizer_folder = *folder;
  return config;
}

}  // namespace strata::engine
