// The scalar steps behind recipe.h: references of the vectorized ones, and their first and last few
// elements. Private to this layer. The polynomials of logarithm, sine and cosine are those of the
// Cephes library, that of the inverse error function is M. Giles's ("Approximating the erfinv
// function", 2012).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "strata/kernels/recipe.h"

namespace strata::kernels {

// --- random words ---

constexpr std::uint32_t kPhiloxFirst = 0xD2511F53U;
constexpr std::uint32_t kPhiloxSecond = 0xCD9E8D57U;
constexpr std::uint32_t kPhiloxKeyFirst = 0x9E3779B9U;
constexpr std::uint32_t kPhiloxKeySecond = 0xBB67AE85U;
constexpr int kPhiloxRounds = 10;
constexpr std::int64_t kWords = 4;  // of a block, one for each of four elements

using PhiloxBlock = std::array<std::uint32_t, kWords>;

inline PhiloxBlock philox(PhiloxBlock counter, std::uint64_t key) {
  auto first_key = static_cast<std::uint32_t>(key);
  auto second_key = static_cast<std::uint32_t>(key >> 32U);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t first = std::uint64_t{kPhiloxFirst} * counter[0];
    const std::uint64_t second = std::uint64_t{kPhiloxSecond} * counter[2];
    counter = {static_cast<std::uint32_t>(second >> 32U) ^ counter[1] ^ first_key,
               static_cast<std::uint32_t>(second),
               static_cast<std::uint32_t>(first >> 32U) ^ counter[3] ^ second_key,
               static_cast<std::uint32_t>(first)};
    first_key += kPhiloxKeyFirst;
    second_key += kPhiloxKeySecond;
  }
  return counter;
}

// The block of elements [4 number, 4 number + 4).
inline PhiloxBlock block_of(std::uint64_t number, std::uint64_t key) {
  return philox(
      {static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32U), 0, 0}, key);
}

// --- functions ---

inline constexpr float kLogTerms[] = {7.0376836292e-2F,  -1.1514610310e-1F, 1.1676998740e-1F,
                                      -1.2420140846e-1F, 1.4249322787e-1F,  -1.6668057665e-1F,
                                      2.0000714765e-1F,  -2.4999993993e-1F, 3.3333331174e-1F};
inline constexpr std::int32_t kRootOfHalf = 0x3F3504F3;  // the bits of sqrt(0.5)
inline constexpr float kLn2High = 0.693359375F;
inline constexpr float kLn2Low = -2.12194440e-4F;
inline constexpr float kSinTerms[] = {-1.9515295891e-4F, 8.3321608736e-3F, -1.6666654611e-1F};
inline constexpr float kCosTerms[] = {2.443315711809948e-5F, -1.388731625493765e-3F,
                                      4.166664568298827e-2F};
inline constexpr float kErfinvCentre[] = {2.81022636e-08F,  3.43273939e-07F, -3.5233877e-06F,
                                          -4.39150654e-06F, 0.00021858087F,  -0.00125372503F,
                                          -0.00417768164F,  0.246640727F,    1.50140941F};
inline constexpr float kErfinvTail[] = {-0.000200214257F, 0.000100950558F, 0.00134934322F,
                                        -0.00367342844F,  0.00573950773F,  -0.0076224613F,
                                        0.00943887047F,   1.00167406F,     2.83297682F};
inline constexpr float kHalfPi = 1.57079637F;

template <std::size_t kCount>
float polynomial(const float (&terms)[kCount], float x) {
  float sum = terms[0];
  for (std::size_t i = 1; i < kCount; ++i) sum = std::fma(sum, x, terms[i]);
  return sum;
}

// `x` is a positive normal number.
inline float natural_log(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  const std::int32_t exponent = (bits - kRootOfHalf) >> 23;
  const float m = std::bit_cast<float>(bits - exponent * (1 << 23)) - 1.0F;
  const auto e = static_cast<float>(exponent);
  const float z = m * m;
  float y = polynomial(kLogTerms, m) * m * z;
  y = std::fma(e, kLn2Low, y);
  y = std::fma(z, -0.5F, y);
  return std::fma(e, kLn2High, m + y);
}

inline float inverse_erf(float x) {
  if (!(std::abs(x) < 1.0F)) {
    const float end = std::copysign(std::numeric_limits<float>::infinity(), x);
    return std::abs(x) == 1.0F ? end : std::numeric_limits<float>::quiet_NaN();
  }
  const float w = -natural_log(std::fma(-x, x, 1.0F));
  const float centre = polynomial(kErfinvCentre, w - 2.5F);
  const float tail = polynomial(kErfinvTail, std::sqrt(w) - 3.0F);
  return (w < 5.0F ? centre : tail) * x;
}

// --- distributions ---

inline float uniform_of(std::uint32_t word, float a, float b) {
  const float value = std::fma(static_cast<float>(word >> 8U) * 0x1p-24F, b - a, a);
  return value < b ? value : a;  // rounded up to the end that does not belong to it
}

// Two numbers of mean 0 and deviation 1 (Box and Muller).
inline std::array<float, 2> normal_pair(std::uint32_t first, std::uint32_t second) {
  const float u =
      std::fma(static_cast<float>(static_cast<std::int32_t>(first >> 1U)), 0x1p-31F, 0x1p-32F);
  const float radius = std::sqrt(-2.0F * natural_log(u));
  // A quarter of the circle, and an angle of up to an eighth of it from its middle.
  const std::uint32_t quarter = second >> 30U;
  const auto part = static_cast<float>(static_cast<std::int32_t>((second >> 6U) & 0xFFFFFFU));
  const float angle = (std::fma(part, 0x1p-24F, -0.5F) + 0x1p-25F) * kHalfPi;
  const float z = angle * angle;
  const float sine = std::fma(polynomial(kSinTerms, z) * z, angle, angle);
  const float cosine = std::fma(polynomial(kCosTerms, z) * z, z, std::fma(z, -0.5F, 1.0F));
  const float along = (quarter & 1U) != 0 ? sine : cosine;
  const float across = (quarter & 1U) != 0 ? cosine : sine;
  const bool turned = quarter == 1 || quarter == 2;
  return {radius * (turned ? -along : along), radius * ((quarter & 2U) != 0 ? -across : across)};
}

inline float random_element(const RecipeStep& step, std::int64_t index) {
  const PhiloxBlock words = block_of(static_cast<std::uint64_t>(index / kWords), step.key);
  const auto word = static_cast<std::size_t>(index % kWords);
  if (step.op == RecipeOp::kUniform) return uniform_of(words[word], step.a, step.b);
  const std::size_t pair = word & ~std::size_t{1};
  return std::fma(normal_pair(words[pair], words[pair + 1])[word - pair], step.b, step.a);
}

// --- steps ---

inline float changed(const RecipeStep& step, std::int64_t index, float value) {
  switch (step.op) {
    case RecipeOp::kFill:
      return step.a;
    case RecipeOp::kUniform:
    case RecipeOp::kNormal:
      return random_element(step, index);
    case RecipeOp::kAdd:
      return value + step.a;
    case RecipeOp::kMultiply:
      return value * step.a;
    case RecipeOp::kDivide:
      return value / step.a;
    case RecipeOp::kClamp:
      return std::min(std::max(value, step.a), step.b);
    case RecipeOp::kErfinv:
      return inverse_erf(value);
  }
  return value;
}

// Applies a step to elements [first, last); values[0] is element `first`.
inline void apply_scalars(const RecipeStep& step, std::int64_t first, std::int64_t last,
                          float* values) {
  for (std::int64_t i = first; i < last; ++i)
    values[i - first] = changed(step, i, values[i - first]);
}

// Calls body(first, last) for each run of elements of `region` that lies in [begin, end).
template <typename Body>
void for_each_run(const Region& region, std::int64_t begin, std::int64_t end, const Body& body) {
  std::int64_t row = 0;
  if (region.rows > 1 && begin > region.begin.value)
    row = (begin - region.begin.value) / region.stride.value;
  for (; row < region.rows; ++row) {
    const std::int64_t at = region.begin.value + row * region.stride.value;
    if (at >= end) break;
    const std::int64_t low = std::max(at, begin);
    const std::int64_t high = std::min(at + region.length.value, end);
    if (low < high) body(low, high);
  }
}

}  // namespace strata::kernels
