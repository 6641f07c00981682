// Learning rates as a function of the optimizer step: WarmupLR, WarmupDecayLR, WarmupCosineLR,
// OneCycle and LRRangeTest, with their parameters as scheduler.params of a configuration names
// them; and Scheduler, a schedule with its position. Values equal those of DeepSpeed 0.19.8, whose
// oddities are part of the contract: a logarithmic warm-up begins with two steps at the lowest rate
// (log 1 = 0), a warm-up lasts at least two steps, OneCycle sets beta2 to 0.99. Steps are numbered
// as the schedulers' last_batch_iteration: -1 is the state at the start, before any step.
//
// Threads: parameters and schedules are immutable, safe everywhere; a Scheduler, one thread at a
// time. Errors: ConfigError for lists of a wrong length and lengths that make no schedule;
// UsageError for a step below -1.
#pragma once

#include <cstdint>
#include <functional>
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

// From min_lr to max_lr, which then stays.
struct WarmupLrParams {
  PerGroup min_lr = PerGroup::all(0.0);
  std::optional<PerGroup> max_lr;  // absent: each group's own rate
  std::int64_t warmup_steps = 1000;
  WarmupShape shape = WarmupShape::kLog;
};

// Then in a line back to min_lr, reached at total_steps.
struct WarmupDecayLrParams {
  std::int64_t total_steps = 0;
  WarmupLrParams warmup;
};

// From min_ratio to 1 of each group's own rate, then by a cosine to cos_min_ratio, which stays.
struct WarmupCosineLrParams {
  std::int64_t total_steps = 0;
  double min_ratio = 0.0;
  std::int64_t warmup_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupShape shape = WarmupShape::kLog;
};

// Up, down, then decay (Smith 2018).
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

// Steadily up.
struct LrRangeTestParams {
  PerGroup min_lr = PerGroup::all(1e-3);
  std::int64_t step_size = 2000;
  double step_rate = 1.0;
  bool staircase = false;
};

using ScheduleParams = std::variant<WarmupLrParams, WarmupDecayLrParams, WarmupCosineLrParams,
                                    OneCycleParams, LrRangeTestParams>;

struct Betas {
  double beta1 = 0.0;
  double beta2 = 0.0;
};

struct Rates {
  std::vector<double> lrs;                       // one a parameter group
  std::optional<std::vector<Betas>> betas = {};  // set them too, when given
};

// The rates of one step, for iteration >= -1.
using Schedule = std::function<Rates(std::int64_t iteration)>;

// The properties of the optimizer that a schedule needs.
struct ScheduledOptimizer {
  std::vector<double> group_lrs;  // at construction
  bool has_betas = true;          // OneCycle cycles the momentum of such optimizers only
};

Schedule make_schedule(const ScheduleParams& params, const ScheduledOptimizer& optimizer);

// A schedule and its position. The engine steps it after every applied optimizer step.
class Scheduler {
 public:
  static constexpr std::int64_t kStart = -1;

  // `last_iteration`: the step after which it continues; kStart begins anew.
  explicit Scheduler(Schedule schedule, std::int64_t last_iteration = kStart);

  // The rates to write into the parameter groups at construction; absent when it continues.
  std::optional<Rates> initial() const {
    if (last_iteration_ != kStart) return std::nullopt;
    return current();
  }
  // Goes one step on and returns what to write into the parameter groups.
  Rates step() { return step_to(last_iteration_ + 1); }
  // Goes to `iteration`, as step(iteration) of torch's schedulers does.
  Rates step_to(std::int64_t iteration) {
    set_last_iteration(iteration);
    return current();
  }
  // Rates of the step it stands at.
  Rates current() const { return schedule_(last_iteration_); }

  // The whole state, for checkpoints.
  std::int64_t last_iteration() const { return last_iteration_; }
  void set_last_iteration(std::int64_t iteration);

 private:
  Schedule schedule_;
  std::int64_t last_iteration_;
};

}  // namespace strata::engine
