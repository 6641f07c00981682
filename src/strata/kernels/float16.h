// The two 16-bit floating-point formats as storage, converted in software. Rounding is to nearest
// even, subnormals are kept, a NaN becomes a quiet NaN of the same sign: the same bits as the
// hardware's conversions, so this is also the reference of the vectorized kernels.
// Pure functions; safe everywhere.
#pragma once

#include <bit>
#include <cstdint>

namespace strata::kernels {

struct BFloat16 {
  std::uint16_t bits = 0;
};

struct Float16 {
  std::uint16_t bits = 0;
};

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16);
}

inline BFloat16 bfloat16_from(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const std::uint32_t rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  return {static_cast<std::uint16_t>((nan ? bits | 0x00400000U : rounded) >> 16)};
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = (std::uint32_t{value.bits} & 0x8000U) << 16;
  const std::uint32_t exponent = (std::uint32_t{value.bits} >> 10) & 0x1FU;
  const std::uint32_t mantissa = std::uint32_t{value.bits} & 0x3FFU;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x00400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (mantissa << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

inline Float16 float16_from(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {  // NaN
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // 65520 and above round to infinity
    half = 0x7C00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds at the last subnormal bit
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    half = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U;
  } else {
    half = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace strata::kernels
