// The factor of the loss under fp16: fixed, or dynamic as DeepSpeed 0.19.8 moves it. A dynamic
// scale halves when gradients overflow (after `hysteresis` overflows) and doubles after `window`
// steps in a row without one. An overflow when it already stands at its minimum is an error, since
// training cannot go on. Threads: one at a time; every rank updates its own with the same overflow
// flag, so that all stay equal.
#pragma once

#include <algorithm>
#include <cstdint>

#include "strata/base/error.h"

namespace strata::engine {

struct LossScaleParams {
  double fixed = 1.0;  // the scale; 0: dynamic, by the fields below
  double initial = 65536.0;
  std::int64_t window = 1000;
  std::int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;  // a step without overflow restores the hysteresis
  double minimum = 1.0;

  bool operator==(const LossScaleParams&) const = default;
};

// Gradients overflow although the loss scale is at its minimum.
struct LossScaleError : Error {
  using Error::Error;
};

class LossScaler {
 public:
  // The state that a checkpoint holds.
  struct State {
    double scale = 1.0;
    std::int64_t iteration = 0;
    std::int64_t last_overflow = -1;
    std::int64_t hysteresis_left = 0;

    bool operator==(const State&) const = default;
  };

  // Errors: ConfigError when a dynamic scale has no window or no minimum.
  explicit LossScaler(const LossScaleParams& params) : params_(params) {
    state_.scale = dynamic() ? params.initial : params.fixed;
    state_.hysteresis_left = params.hysteresis;
    if (!dynamic()) return;
    if (params.window <= 0 || params.minimum <= 0.0)
      throw ConfigError(
          "a dynamic loss scale (fp16.loss_scale 0) needs fp16.loss_scale_window > 0 and "
          "fp16.min_loss_scale > 0; found {} and {}",
          params.window, params.minimum);
  }

  bool dynamic() const { return params_.fixed == 0.0; }
  double scale() const { return state_.scale; }

  // Counts one optimizer step, applied or skipped for overflow. Errors: LossScaleError.
  void update(bool overflow) {
    if (!dynamic()) return;
    if (overflow) {
      if (params_.hysteresis == 1 || state_.hysteresis_left == 1)
        shrink();
      else
        --state_.hysteresis_left;
      state_.last_overflow = state_.iteration;
    } else {
      if (params_.consecutive_hysteresis) state_.hysteresis_left = params_.hysteresis;
      const std::int64_t clean = state_.iteration - state_.last_overflow - 1;
      if (clean > 0 && clean % params_.window == 0) {
        state_.hysteresis_left = params_.hysteresis;
        state_.scale *= kFactor;
      }
    }
    ++state_.iteration;
  }

  const State& state() const { return state_; }
  void set_state(const State& state) { state_ = state; }

 private:
  void shrink() {
    if (state_.scale == params_.minimum)
      throw LossScaleError(
          "gradients are not finite although the loss scale is at its minimum, so it cannot fall "
          "any more; look for a diverging loss, lower the learning rate, or train in bf16; loss "
          "scale {}, optimizer step {}",
          state_.scale, state_.iteration);
    state_.scale = std::max(state_.scale / kFactor, params_.minimum);
  }

  static constexpr double kFactor = 2.0;

  LossScaleParams params_;
  State state_;
};

}  // namespace strata::engine
