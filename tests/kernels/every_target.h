// The tests of the kernels share these: a run under every instruction set that this processor and
// this build have, and arrays of awkward numbers at awkward addresses. Single-threaded.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "strata/kernels/targets.h"
// After targets.h.
#include <hwy/highway.h>

namespace strata::kernels {

// Sizes around vectors, cache lines, chunks and grains.
inline const std::vector<std::size_t> kSizes = {0,  1,  3,   7,    8,    15,    16,   17,
                                                31, 33, 100, 2047, 2049, 65536, 70001};

// Calls `check` once for each target that the kernels can be dispatched to here.
template <typename Check>
void for_every_target(Check&& check) {
  const std::int64_t supported = hwy::SupportedTargets();
  int seen = 0;
  for (std::int64_t rest = supported & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(hwy::TargetName(target));
    check();
    ++seen;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(supported);
  EXPECT_GT(seen, 0);
}

// Normal numbers of many magnitudes, and here and there numbers that break careless kernels.
inline std::vector<float> awkward_numbers(std::size_t numel, std::uint32_t seed) {
  constexpr float kSpecials[] = {0.0F,
                                 -0.0F,
                                 1e-40F,
                                 -1e-45F,
                                 6e-8F,
                                 -5.96e-8F,
                                 6.1e-5F,
                                 65504.0F,
                                 65519.99F,
                                 65520.0F,
                                 -1e38F,
                                 3.4e38F,
                                 1.00390625F,
                                 std::numeric_limits<float>::infinity(),
                                 -std::numeric_limits<float>::infinity(),
                                 std::numeric_limits<float>::quiet_NaN()};
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> mantissa(-2.0F, 2.0F);
  std::uniform_int_distribution<int> exponent(-20, 14);
  std::vector<float> numbers(numel);
  for (float& number : numbers) {
    number = random() % 9 == 0 ? kSpecials[random() % std::size(kSpecials)]
                               : std::ldexp(mantissa(random), exponent(random));
  }
  return numbers;
}

// The same without infinities, NaNs and magnitudes that no gradient has.
inline std::vector<float> plain_numbers(std::size_t numel, std::uint32_t seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(numel);
  for (float& number : numbers) number = normal(random) * std::exp(2.0F * normal(random)) * scale;
  return numbers;
}

// Equal bits, except that one NaN is as good as another.
inline bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

}  // namespace strata::kernels
