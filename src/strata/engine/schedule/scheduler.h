// A schedule and its position. The engine steps it after every applied optimizer step. Threads: one
// at a time. Owns its schedule. Errors: ConfigError, UsageError.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "strata/engine/schedule/schedule.h"

namespace strata::engine {

struct Rates {
  std::vector<double> lrs;                  // one a parameter group
  std::optional<std::vector<Betas>> betas;  // set them too, when given
};

class Scheduler {
 public:
  static constexpr std::int64_t kStart = -1;

  // `last_iteration`: the step after which it continues; kStart begins anew.
  explicit Scheduler(std::unique_ptr<Schedule> schedule, std::int64_t last_iteration = kStart);

  // The rates to write into the parameter groups at construction; absent when it continues.
  std::optional<Rates> initial() const;
  // Goes one step on and returns what to write into the parameter groups.
  Rates step();
  // Goes to `iteration`, as step(iteration) of torch's schedulers does.
  Rates step_to(std::int64_t iteration);
  // Rates of the step it stands at.
  Rates current() const;

  // The whole state, for checkpoints.
  std::int64_t last_iteration() const { return last_iteration_; }
  void set_last_iteration(std::int64_t iteration);

 private:
  std::unique_ptr<Schedule> schedule_;
  std::int64_t last_iteration_;
};

}  // namespace strata::engine
