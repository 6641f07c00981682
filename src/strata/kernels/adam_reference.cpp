#include <cstring>

#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/adam_constants.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {

void check_adam(const AdamSpans& spans, const AdamScalars& scalars) {
  const std::size_t numel = spans.weight.size();
  STRATA_ASSERT(spans.exp_avg.size() == numel);
  STRATA_ASSERT(spans.exp_avg_sq.size() == numel);
  STRATA_ASSERT(spans.gradient.size() == numel);
  STRATA_ASSERT(scalars.step >= 1);
  if (spans.weight16 == nullptr) return;
  if (spans.weight16_dtype != DType::kBFloat16 && spans.weight16_dtype != DType::kFloat16) {
    throw UsageError(fmt::format(
        "The copy of the weights that Adam writes is bfloat16 or float16; asked for: {}",
        name_of(spans.weight16_dtype)));
  }
}

AdamSpans part_of(const AdamSpans& spans, std::size_t begin, std::size_t end) {
  const std::size_t numel = end - begin;
  AdamSpans part = spans;
  part.weight = spans.weight.subspan(begin, numel);
  part.exp_avg = spans.exp_avg.subspan(begin, numel);
  part.exp_avg_sq = spans.exp_avg_sq.subspan(begin, numel);
  part.gradient = spans.gradient.subspan(begin, numel);
  if (part.weight16 != nullptr) part.weight16 += 2 * begin;
  return part;
}

void adam_scalar_loop(const AdamSpans& spans, const AdamConstants& c) {
  for (std::size_t i = 0; i < spans.weight.size(); ++i) {
    float gradient = spans.gradient[i] * c.gradient_scale;
    if (c.l2 != 0.0F) gradient = std::fma(c.l2, spans.weight[i], gradient);
    float& m = spans.exp_avg[i];
    float& v = spans.exp_avg_sq[i];
    m = std::fma(c.lerp_weight, gradient - m, c.lerp_from_gradient ? gradient : m);
    v = std::fma(c.square_weight * gradient, gradient, v * c.beta2);
    const float denominator = std::sqrt(v) / c.correction2_root + c.eps;
    const float weight = spans.weight[i] * c.decay + (c.negative_step_size * m) / denominator;
    spans.weight[i] = weight;
    if (spans.weight16 != nullptr) {
      const std::uint16_t bits = spans.weight16_dtype == DType::kBFloat16
                                     ? bfloat16_from(weight).bits
                                     : float16_from(weight).bits;
      std::memcpy(spans.weight16 + 2 * i, &bits, sizeof bits);
    }
  }
}

void adam_step_reference(const AdamSpans& spans, const AdamScalars& scalars) {
  check_adam(spans, scalars);
  adam_scalar_loop(spans, AdamConstants(scalars));
}

}  // namespace strata::kernels
