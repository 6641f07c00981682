// Learning rates as a function of the optimizer step: WarmupLR, WarmupDecayLR, WarmupCosineLR,
// OneCycle and LRRangeTest. Values equal those of DeepSpeed 0.19.8, whose oddities are part of the
// contract: a logarithmic warm-up begins with two steps at the lowest rate (log 1 = 0), a warm-up
// lasts at least two steps, OneCycle sets beta2 to 0.99. Steps are numbered as the schedulers'
// last_batch_iteration: -1 is the state at the start, before any step. Threads: immutable objects,
// safe everywhere. Errors: ConfigError for lists of a wrong length.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "strata/engine/schedule/schedule_params.h"

namespace strata::engine {

// A number of steps in a formula.
inline double as_double(std::int64_t steps) {
  return static_cast<double>(steps);
}

struct Betas {
  double beta1 = 0.0;
  double beta2 = 0.0;
};

class Schedule {
 public:
  virtual ~Schedule() = default;
  Schedule() = default;
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // One rate a parameter group, for iteration >= -1.
  virtual std::vector<double> lrs(std::int64_t iteration) const = 0;
  // One pair a parameter group, or nothing when the schedule leaves the momentum alone.
  virtual std::optional<std::vector<Betas>> betas(std::int64_t iteration) const;
};

// The properties of the optimizer that a schedule needs.
struct ScheduledOptimizer {
  std::vector<double> group_lrs;  // at construction
  bool has_betas = true;          // OneCycle cycles the momentum of such optimizers only
};

std::unique_ptr<Schedule> make_schedule(const ScheduleParams& params,
                                        const ScheduledOptimizer& optimizer);

}  // namespace strata::engine
