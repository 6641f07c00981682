#include "strata/engine/schedule/scheduler.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::engine {

Scheduler::Scheduler(std::unique_ptr<Schedule> schedule, std::int64_t last_iteration)
    : schedule_(std::move(schedule)), last_iteration_(last_iteration) {
  STRATA_ASSERT(schedule_ != nullptr);
  set_last_iteration(last_iteration);
}

std::optional<Rates> Scheduler::initial() const {
  if (last_iteration_ != kStart) return std::nullopt;
  return current();
}

Rates Scheduler::step() {
  return step_to(last_iteration_ + 1);
}

Rates Scheduler::step_to(std::int64_t iteration) {
  set_last_iteration(iteration);
  return current();
}

Rates Scheduler::current() const {
  return {schedule_->lrs(last_iteration_), schedule_->betas(last_iteration_)};
}

void Scheduler::set_last_iteration(std::int64_t iteration) {
  if (iteration < kStart) {
    throw UsageError(fmt::format(
        "a scheduler's last_batch_iteration is -1 (not begun) or a step counted from 0; found {}",
        iteration));
  }
  last_iteration_ = iteration;
}

}  // namespace strata::engine
