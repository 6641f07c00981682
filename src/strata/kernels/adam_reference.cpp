#include <cstring>

#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/adam_constants.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {
namespace {

float master_at(const AdamSpans& spans, std::size_t i) {
  if (!spans.has_remainder()) return spans.weight[i];
  BFloat16 weight;
  std::memcpy(&weight, spans.weight16 + 2 * i, sizeof weight);
  return joined_master(weight, remainder_at(spans.remainder, i));
}

}  // namespace

void check_adam(const AdamSpans& spans, const AdamScalars& scalars) {
  const std::size_t numel = spans.gradient.size();
  STRATA_ASSERT(spans.exp_avg.size() == numel);
  STRATA_ASSERT(spans.exp_avg_sq.size() == numel);
  STRATA_ASSERT(spans.weight.size() == (spans.has_remainder() ? 0 : numel));
  STRATA_ASSERT(scalars.step >= 1);
  if (spans.has_remainder() &&
      (spans.weight16 == nullptr || spans.weight16_dtype != DType::kBFloat16)) {
    throw UsageError("Adam finds master weights in bfloat16 weights and their remainder alone");
  }
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
  if (spans.has_remainder()) {
    STRATA_ASSERT(begin % 8 == 0);
    part.remainder = spans.remainder.from(begin);
  } else {
    part.weight = spans.weight.subspan(begin, numel);
  }
  part.exp_avg = spans.exp_avg.subspan(begin, numel);
  part.exp_avg_sq = spans.exp_avg_sq.subspan(begin, numel);
  part.gradient = spans.gradient.subspan(begin, numel);
  if (part.weight16 != nullptr) part.weight16 += 2 * begin;
  return part;
}

void adam_scalar_loop(const AdamSpans& spans, const AdamConstants& c) {
  for (std::size_t i = 0; i < spans.gradient.size(); ++i) {
    const float before = master_at(spans, i);
    float gradient = spans.gradient[i] * c.gradient_scale;
    if (c.l2 != 0.0F) gradient = std::fma(c.l2, before, gradient);
    float& m = spans.exp_avg[i];
    float& v = spans.exp_avg_sq[i];
    m = std::fma(c.lerp_weight, gradient - m, c.lerp_from_gradient ? gradient : m);
    v = std::fma(c.square_weight * gradient, gradient, v * c.beta2);
    const float denominator = std::sqrt(v) / c.correction2_root + c.eps;
    const float weight = before * c.decay + (c.negative_step_size * m) / denominator;
    if (spans.has_remainder()) {
      set_remainder(spans.remainder, i, remainder_of(weight));
    } else {
      spans.weight[i] = weight;
    }
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
