// Parameters of the learning-rate schedules, as scheduler.params of a configuration names them.
// Plain values. Counts are optimizer steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

namespace strata::engine {

// One value for all parameter groups, or one for each.
struct PerGroup {
  std::vector<double> values;
  bool scalar = true;

  static PerGroup all(double value) { return {{value}, true}; }
  static PerGroup each(std::vector<double> values) { return {std::move(values), false}; }

  // One value a group. Errors: ConfigError naming `path` when the list has another length.
  std::vector<double> spread(std::size_t groups, std::string_view path) const;
};

enum class WarmupShape : std::uint8_t { kLog, kLinear };

struct WarmupLrParams {
  PerGroup min_lr = PerGroup::all(0.0);
  std::optional<PerGroup> max_lr;  // absent: each group's own rate
  std::int64_t warmup_steps = 1000;
  WarmupShape shape = WarmupShape::kLog;
};

struct WarmupDecayLrParams {
  std::int64_t total_steps = 0;
  WarmupLrParams warmup;
};

struct WarmupCosineLrParams {
  std::int64_t total_steps = 0;
  double min_ratio = 0.0;
  std::int64_t warmup_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupShape shape = WarmupShape::kLog;
};

struct OneCycleParams {
  PerGroup min_lr;
  PerGroup max_lr;
  double decay_lr_rate = 0.0;
  double first_step_size = 2000.0;
  std::optional<double> second_step_size;  // absent: as the first
  std::int64_t first_stair_count = 0;
  std::optional<std::int64_t> second_stair_count;  // absent: as the first
  double decay_step_size = 0.0;
  bool cycle_momentum = true;
  PerGroup min_momentum = PerGroup::all(0.8);
  PerGroup max_momentum = PerGroup::all(0.9);
  double decay_momentum_rate = 0.0;
};

struct LrRangeTestParams {
  PerGroup min_lr = PerGroup::all(1e-3);
  std::int64_t step_size = 2000;
  double step_rate = 1.0;
  bool staircase = false;
};

using ScheduleParams = std::variant<WarmupLrParams, WarmupDecayLrParams, WarmupCosineLrParams,
                                    OneCycleParams, LrRangeTestParams>;

}  // namespace strata::engine
