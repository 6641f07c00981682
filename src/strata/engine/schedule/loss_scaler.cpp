#include "strata/engine/schedule/loss_scaler.h"

#include <fmt/core.h>

#include <algorithm>

namespace strata::engine {
namespace {

constexpr double kFactor = 2.0;

}  // namespace

LossScaler::LossScaler(const LossScaleParams& params) : params_(params) {
  state_.scale = dynamic() ? params.initial : params.fixed;
  state_.hysteresis_left = params.hysteresis;
  if (!dynamic()) return;
  if (params.window <= 0 || params.minimum <= 0.0) {
    throw ConfigError(
        fmt::format("a dynamic loss scale (fp16.loss_scale 0) needs fp16.loss_scale_window > 0 and "
                    "fp16.min_loss_scale > 0; found {} and {}",
                    params.window, params.minimum));
  }
}

void LossScaler::update(bool overflow) {
  if (!dynamic()) return;
  if (overflow) {
    if (params_.hysteresis == 1 || state_.hysteresis_left == 1) {
      shrink();
    } else {
      --state_.hysteresis_left;
    }
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

void LossScaler::shrink() {
  if (state_.scale == params_.minimum) {
    throw LossScaleError(
        fmt::format("gradients are not finite although the loss scale is at its minimum, so it "
                    "cannot fall any more; look for a diverging loss, lower the learning rate, or "
                    "train in bf16; loss scale {}, optimizer step {}",
                    state_.scale, state_.iteration));
  }
  state_.scale = std::max(state_.scale / kFactor, params_.minimum);
}

}  // namespace strata::engine
