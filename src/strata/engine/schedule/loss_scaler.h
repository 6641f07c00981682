// The factor of the loss under fp16: fixed, or dynamic as DeepSpeed 0.19.8 moves it. A dynamic
// scale halves when gradients overflow (after `hysteresis` overflows) and doubles after `window`
// steps in a row without one. An overflow when it already stands at its minimum is an error, since
// training cannot go on. Threads: one at a time; every rank updates its own with the same overflow
// flag, so that all stay equal.
#pragma once

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
class LossScaleError : public Error {
 public:
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
  explicit LossScaler(const LossScaleParams& params);

  bool dynamic() const { return params_.fixed == 0.0; }
  double scale() const { return state_.scale; }

  // Counts one optimizer step, applied or skipped for overflow. Errors: LossScaleError.
  void update(bool overflow);

  const State& state() const { return state_; }
  void set_state(const State& state) { state_ = state; }

 private:
  void shrink();

  LossScaleParams params_;
  State state_;
};

}  // namespace strata::engine
