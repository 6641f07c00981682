// The scalars that one update applies to each element: computed in fp64, then rounded to fp32
// once, as torch does with Python numbers. Private to this layer.
#pragma once

#include <cmath>

#include "strata/kernels/update.h"

namespace strata::kernels {

struct UpdateConstants {
  float gradient_scale;
  float decay;              // the weight's factor; 1 without decoupled decay
  float l2;                 // share of the weight added to the gradient; 0 without L2
  bool lerp_from_gradient;  // exp_avg moves more than half of the way: start at the other end
  // Adam: exp_avg = base + lerp_weight * (gradient - exp_avg). Lion: the gradient's share in the
  // direction, beside beta1 of exp_avg.
  float lerp_weight;
  float beta1;
  float beta2;
  float rest2;             // 1 - beta2
  float correction2_root;  // sqrt(1 - beta2^step); 1 without bias correction
  float eps;
  float negative_step_size;  // -lr / (1 - beta1^step); -lr without

  explicit UpdateConstants(const UpdateScalars& s)
      : gradient_scale(s.gradient_scale),
        decay(s.decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0F),
        l2(s.decoupled ? 0.0F : static_cast<float>(s.weight_decay)),
        lerp_from_gradient(s.formula == Formula::kAdam &&
                           std::fabs(static_cast<float>(1.0 - s.beta1)) >= 0.5F),
        lerp_weight(static_cast<float>(1.0 - s.beta1) - (lerp_from_gradient ? 1.0F : 0.0F)),
        beta1(static_cast<float>(s.beta1)),
        beta2(static_cast<float>(s.beta2)),
        rest2(static_cast<float>(1.0 - s.beta2)),
        correction2_root(static_cast<float>(std::pow(correction(s, s.beta2), 0.5))),
        eps(static_cast<float>(s.eps)),
        negative_step_size(static_cast<float>(-(s.lr / correction(s, s.beta1)))) {}

 private:
  static double correction(const UpdateScalars& s, double beta) {
    return s.bias_correction && s.formula == Formula::kAdam
               ? 1.0 - std::pow(beta, static_cast<double>(s.step))
               : 1.0;
  }
};

// Throws UsageError when lengths, the step or the 16-bit type do not fit.
void check_update(const UpdateSpans& spans, const UpdateScalars& scalars);

// One range of a step, element by element.
void update_scalar_loop(const UpdateSpans& spans, const UpdateConstants& constants,
                        Formula formula);

// Elements [begin, end) of all spans; with a remainder from a multiple of 8, with states of 8 bits
// from the beginning of a block.
UpdateSpans part_of(const UpdateSpans& spans, std::size_t begin, std::size_t end);

}  // namespace strata::kernels
