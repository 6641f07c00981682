// Learning rates as a function of the optimizer step: WarmupLR, WarmupDecayLR, WarmupCosineLR,
// OneCycle and LRRangeTest; and Scheduler, a schedule with its position. Values equal those of
// DeepSpeed 0.19.8, whose oddities are part of the contract: a logarithmic warm-up begins with two
// steps at the lowest rate (log 1 = 0), a warm-up lasts at least two steps, OneCycle sets beta2 to
// 0.99. Steps are numbered as the schedulers' last_batch_iteration: -1 is the state at the start,
// before any step.
//
// Threads: parameters and schedules are immutable, safe everywhere; a Scheduler, one thread at a
// time. Errors: ConfigError for lists of a wrong length; UsageError for a step below -1.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace strata::engine {

// One of these, as a configuration describes it.
struct ScheduleParams {
  std::string type;    // "WarmupLR"
  std::string values;  // of scheduler.params, as JSON text: all that the key table has for the type
};

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
