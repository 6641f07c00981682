#include "strata/engine/pass_state.h"

#include <utility>

namespace strata::engine {
namespace {

[[noreturn]] void throw_no_backward() {
  throw MissingBackward(
      "step() was called without a backward pass since the last step; call backward(loss) first");
}

}  // namespace

bool PassState::begin_forward() {
  const bool starts = phase_ == Phase::kBefore || phase_ == Phase::kAfter;
  if (starts) phase_ = Phase::kForward;
  return starts;
}

void PassState::require_backward_may_begin() const {
  if (in_backward()) throw UsageError("backward() was called while a backward pass is running");
  if (phase_ == Phase::kBefore) {
    throw UsageError(
        "backward() was called without a forward pass; call the engine with a batch first, then "
        "backward() on the loss it gave");
  }
}

void PassState::end_backward() {
  STRATA_ASSERT(in_backward());
  phase_ = Phase::kAfter;
  gradients_ = Gradients::kHeld;
}

void PassState::end_micro_step() {
  const bool held = gradients_ == Gradients::kHeld;
  if (!held && gradients_ != Gradients::kDropped) throw_no_backward();
  gradients_ = held ? Gradients::kEarlier : Gradients::kNone;
  if (phase_ == Phase::kAfter) phase_ = Phase::kBefore;
}

void PassState::require_gradients() const {
  if (gradients_ == Gradients::kNone || gradients_ == Gradients::kDropped) throw_no_backward();
}

void PassState::drop_gradients() {
  const bool of_this_micro_step =
      gradients_ == Gradients::kHeld || gradients_ == Gradients::kDropped;
  gradients_ = of_this_micro_step ? Gradients::kDropped : Gradients::kNone;
}

void PassState::fail_update(std::string_view cause) {
  fail("an update of the weights", "the step before",
       "load the weights again, or start anew from a checkpoint", cause);
}

void PassState::fail_loading(std::string_view cause) {
  fail("loading a checkpoint", "before", "load that one again when it is mended, or another",
       cause);
}

void PassState::fail(std::string_view what, std::string_view others, std::string_view remedy,
                     std::string_view cause) {
  broken_ = fmt::format(
      "{} failed half-way, so weights and optimizer states are partly those of {}; {}, before "
      "training or saving goes on. The cause: {}",
      what, others, remedy, cause);
  abandon_backward();
}

void PassState::require_intact_weights() const {
  if (!broken_.empty()) throw UsageError(broken_);
}

}  // namespace strata::engine
