// The scalars that one Adam step applies to each element: computed in fp64, then rounded to fp32
// once, as torch does with Python numbers. Private to this layer.
#pragma once

#include <cmath>

#include "strata/kernels/adam.h"

namespace strata::kernels {

struct AdamConstants {
  float gradient_scale;
  float decay;              // the weight's factor; 1 without decoupled decay
  float l2;                 // share of the weight added to the gradient; 0 without L2
  bool lerp_from_gradient;  // exp_avg moves more than half of the way: start at the other end
  float lerp_weight;        // exp_avg = base + lerp_weight * (gradient - exp_avg)
  float beta2;
  float square_weight;     // 1 - beta2
  float correction2_root;  // sqrt(1 - beta2^step); 1 without bias correction
  float eps;
  float negative_step_size;  // -lr / (1 - beta1^step); -lr without

  explicit AdamConstants(const AdamScalars& s)
      : gradient_scale(s.gradient_scale),
        decay(s.decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0F),
        l2(s.decoupled ? 0.0F : static_cast<float>(s.weight_decay)),
        lerp_from_gradient(std::fabs(static_cast<float>(1.0 - s.beta1)) >= 0.5F),
        lerp_weight(static_cast<float>(1.0 - s.beta1) - (lerp_from_gradient ? 1.0F : 0.0F)),
        beta2(static_cast<float>(s.beta2)),
        square_weight(static_cast<float>(1.0 - s.beta2)),
        correction2_root(static_cast<float>(std::pow(correction(s, s.beta2), 0.5))),
        eps(static_cast<float>(s.eps)),
        negative_step_size(static_cast<float>(-(s.lr / correction(s, s.beta1)))) {}

 private:
  static double correction(const AdamScalars& s, double beta) {
    return s.bias_correction ? 1.0 - std::pow(beta, static_cast<double>(s.step)) : 1.0;
  }
};

// Throws UsageError when lengths, the step or the 16-bit type do not fit.
void check_adam(const AdamSpans& spans, const AdamScalars& scalars);

// One range of a step, element by element.
void adam_scalar_loop(const AdamSpans& spans, const AdamConstants& constants);

// Elements [begin, end) of all spans; with a remainder, from a multiple of 8.
AdamSpans part_of(const AdamSpans& spans, std::size_t begin, std::size_t end);

}  // namespace strata::kernels
