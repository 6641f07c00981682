// The state of a training loop: which of the engine's calls may come next, and the error of a call
// that may not.
//
//   kBefore --begin_forward--> kForward --begin_backward--> kBackward --end_backward--> kAfter
//
// After kAfter a graph may run backward again (begin_backward), the next forward may begin, or the
// micro-step ends (kBefore). A forward that began after the last backward pass stays good for the
// next micro-step. abandon_backward() leads to kBefore from any state. A step needs the gradients
// of a backward pass since the last step, and a micro-step needs one of its own. If an update or a
// load of the weights has failed half-way, only weights_loaded() may come.
//
// Threads: one thread at a time. Pure bookkeeping. Errors: UsageError from a call that may not come
// now; the state does not change then.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "strata/base/error.h"

namespace strata::engine {

// The error of a step() without a backward pass since the last step(): nothing has changed then. It
// has a class of its own, since a script may end a step twice (engine.step() and optimizer.step()),
// and the engine's caller tells that from a mistake. Plain value.
class MissingBackward : public UsageError {
 public:
  MissingBackward()
      : UsageError(
            "step() was called without a backward pass since the last step; call backward(loss) "
            "first") {}
};

class PassState {
 public:
  // True: a new pass starts. A pass is a forward and its backward.
  bool begin_forward() {
    const bool starts = phase_ == Phase::kBefore || phase_ == Phase::kAfter;
    if (starts) phase_ = Phase::kForward;
    return starts;
  }
  void require_backward_may_begin() const {
    if (in_backward()) throw UsageError("backward() was called while a backward pass is running");
    if (phase_ != Phase::kBefore) return;
    throw UsageError(
        "backward() was called without a forward pass; call the engine with a batch first, then "
        "backward() on the loss it gave");
  }
  void begin_backward() {
    phase_ = Phase::kBackward;
    ++backward_passes_;
  }
  std::int64_t backward_passes() const { return backward_passes_; }  // that have begun
  bool in_backward() const { return phase_ == Phase::kBackward; }
  void end_backward() {
    STRATA_ASSERT(in_backward());
    phase_ = Phase::kAfter;
    gradients_ = Gradients::kHeld;
  }
  void abandon_backward() {
    phase_ = Phase::kBefore;
    gradients_ = Gradients::kNone;
  }
  void end_micro_step() {
    const bool held = gradients_ == Gradients::kHeld;
    if (!held && gradients_ != Gradients::kDropped) throw MissingBackward();
    gradients_ = held ? Gradients::kEarlier : Gradients::kNone;
    if (phase_ == Phase::kAfter) phase_ = Phase::kBefore;
  }

  void require_gradients() const {
    if (gradients_ == Gradients::kNone || gradients_ == Gradients::kDropped)
      throw MissingBackward();
  }
  // Drops the gradients of all micro-steps since the last step.
  void drop_gradients() {
    const bool of_this_micro_step =
        gradients_ == Gradients::kHeld || gradients_ == Gradients::kDropped;
    gradients_ = of_this_micro_step ? Gradients::kDropped : Gradients::kNone;
  }
  void end_step() { gradients_ = Gradients::kNone; }

  // `cause`: the error that left weights and states of two steps, or of two models.
  void fail_update(std::string_view cause) {
    fail("an update of the weights", "the step before",
         "load the weights again, or start anew from a checkpoint", cause);
  }
  void fail_loading(std::string_view cause) {
    fail("loading a checkpoint", "before", "load that one again when it is mended, or another",
         cause);
  }
  void weights_loaded() { broken_.clear(); }
  void require_intact_weights() const {
    if (!broken_.empty()) throw UsageError(broken_);
  }

  bool forward_seen() const { return phase_ != Phase::kBefore; }

 private:
  void fail(std::string_view what, std::string_view others, std::string_view remedy,
            std::string_view cause) {
    broken_ = fmt::format(
        "{} failed half-way, so weights and optimizer states are partly those of {}; {}, before "
        "training or saving goes on. The cause: {}",
        what, others, remedy, cause);
    abandon_backward();
  }

  enum class Phase { kBefore, kForward, kBackward, kAfter };
  enum class Gradients {
    kNone,     // since the last step
    kEarlier,  // of earlier micro-steps alone
    kHeld,     // of this micro-step, and maybe of earlier ones
    kDropped,  // there were some of this micro-step
  };

  Phase phase_ = Phase::kBefore;
  Gradients gradients_ = Gradients::kNone;
  std::int64_t backward_passes_ = 0;
  std::string broken_;  // what has happened to the weights; empty: nothing
};

}  // namespace strata::engine
