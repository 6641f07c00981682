#include <cstring>

#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/adam_constants.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {
namespace {

BFloat16 bfloat16_at(const std::byte* array, std::size_t i) {
  BFloat16 value;
  std::memcpy(&value, array + 2 * i, sizeof value);
  return value;
}

void set_bfloat16(std::byte* array, std::size_t i, float value) {
  const BFloat16 rounded = bfloat16_from(value);
  std::memcpy(array + 2 * i, &rounded, sizeof rounded);
}

// The master, unless the weight beside it was written.
float followed_master(const AdamSpans& spans, std::size_t i) {
  const float master = spans.weight[i];
  std::uint16_t bits = 0;
  std::memcpy(&bits, spans.weight16 + 2 * i, sizeof bits);
  const bool is_bfloat16 = spans.weight16_dtype == DType::kBFloat16;
  const float weight = is_bfloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
  const float rounded =
      is_bfloat16 ? to_float(bfloat16_from(master)) : to_float(float16_from(master));
  return rounded == weight ? master : weight;
}

float master_at(const AdamSpans& spans, std::size_t i) {
  if (spans.rounds_weight16) return to_float(bfloat16_at(spans.weight16, i));
  if (spans.follows_weight16) return followed_master(spans, i);
  if (!spans.has_remainder()) return spans.weight[i];
  return joined_master(bfloat16_at(spans.weight16, i), remainder_at(spans.remainder, i));
}

struct Moments {
  float first;
  float second;
};

Moments moments_at(const AdamSpans& spans, std::size_t i) {
  if (!spans.has_moments16()) return {spans.exp_avg[i], spans.exp_avg_sq[i]};
  return {to_float(bfloat16_at(spans.moments16.exp_avg, i)),
          to_float(bfloat16_at(spans.moments16.exp_avg_sq, i))};
}

void set_moments(const AdamSpans& spans, std::size_t i, const Moments& moments) {
  if (spans.has_moments16()) {
    set_bfloat16(spans.moments16.exp_avg, i, moments.first);
    set_bfloat16(spans.moments16.exp_avg_sq, i, moments.second);
  } else {
    spans.exp_avg[i] = moments.first;
    spans.exp_avg_sq[i] = moments.second;
  }
}

}  // namespace

void check_adam(const AdamSpans& spans, const AdamScalars& scalars) {
  const std::size_t numel = spans.gradient.size();
  const bool in_weight16 = spans.has_remainder() || spans.rounds_weight16;
  STRATA_ASSERT(!spans.has_remainder() || !spans.rounds_weight16);
  STRATA_ASSERT(!spans.has_moments16() || spans.rounds_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || !in_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || numel == 0 || spans.weight16 != nullptr);
  STRATA_ASSERT(spans.exp_avg.size() == (spans.has_moments16() ? 0 : numel));
  STRATA_ASSERT(spans.exp_avg_sq.size() == (spans.has_moments16() ? 0 : numel));
  STRATA_ASSERT(spans.weight.size() == (in_weight16 ? 0 : numel));
  STRATA_ASSERT(scalars.step >= 1);
  if (in_weight16 && numel > 0 &&
      (spans.weight16 == nullptr || spans.weight16_dtype != DType::kBFloat16)) {
    throw UsageError("Adam finds master weights in bfloat16 weights alone, or with a remainder");
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
  } else if (!spans.rounds_weight16) {
    part.weight = spans.weight.subspan(begin, numel);
  }
  if (spans.has_moments16()) {
    part.moments16.exp_avg += 2 * begin;
    part.moments16.exp_avg_sq += 2 * begin;
  } else {
    part.exp_avg = spans.exp_avg.subspan(begin, numel);
    part.exp_avg_sq = spans.exp_avg_sq.subspan(begin, numel);
  }
  part.gradient = spans.gradient.subspan(begin, numel);
  if (part.weight16 != nullptr) part.weight16 += 2 * begin;
  return part;
}

void adam_scalar_loop(const AdamSpans& spans, const AdamConstants& c) {
  for (std::size_t i = 0; i < spans.gradient.size(); ++i) {
    const float before = master_at(spans, i);
    float gradient = spans.gradient[i] * c.gradient_scale;
    if (c.l2 != 0.0F) gradient = std::fma(c.l2, before, gradient);
    auto [m, v] = moments_at(spans, i);
    m = std::fma(c.lerp_weight, gradient - m, c.lerp_from_gradient ? gradient : m);
    v = std::fma(c.square_weight * gradient, gradient, v * c.beta2);
    const float denominator = std::sqrt(v) / c.correction2_root + c.eps;
    const float weight = before * c.decay + (c.negative_step_size * m) / denominator;
    set_moments(spans, i, {m, v});
    if (spans.has_remainder()) {
      set_remainder(spans.remainder, i, remainder_of(weight));
    } else if (!spans.rounds_weight16) {
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
