// fp32 master weights beside bf16 weights without a bit kept twice: the weight is the upper half of
// its master as it was rounded, the remainder is what that lacks. Both take 4 1/8 bytes, not 6.
//
// A master of the bits h:l, 16 each, has the weight w = bf16(master): h or, rounded up, h + 1. The
// low half l says which: more than 0x8000 is rounded up, less is not. An exact half goes to the
// even neighbour, which w does not show; a bit of its own does. The master is then (w or w - 1):l,
// the same bits for every number; a NaN stays a NaN.
//
// If other code writes a weight, it keeps the remainder of the weight before: the master is then
// within half a unit in the weight's last place. No nonzero master rounds up to zero; so if the
// remainder of a zero says that it was rounded up, other code has written it, and its master is
// zero.
//
// Threads: pure functions of their arrays; work is split over `pool` when one is given. Two threads
// may work on the same array where they are eight elements apart.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/kernels/float16.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

struct MasterRemainder {
  std::uint16_t* low = nullptr;  // one an element
  std::uint8_t* halves_up =
      nullptr;  // bit i % 8 of [i / 8]: element i was an exact half, rounded up

  // The remainder of the elements from `first` on; `first` is a multiple of 8.
  MasterRemainder from(std::size_t first) const { return {low + first, halves_up + first / 8}; }
};

// One element: what rounding it to bf16 loses, and back.
struct RemainderBits {
  std::uint16_t low = 0;
  bool half_up = false;
};
inline RemainderBits remainder_of(float master) {
  const auto bits = std::bit_cast<std::uint32_t>(master);
  return {static_cast<std::uint16_t>(bits), (bits & 0x1FFFFU) == 0x18000U};
}
inline float joined_master(BFloat16 weight, RemainderBits remainder) {
  const bool up = remainder.low > 0x8000U || remainder.half_up;
  if (up && (weight.bits & 0x7FFFU) == 0) return to_float(weight);
  const std::uint32_t high = std::uint32_t{weight.bits} - (up ? 1U : 0U);
  return std::bit_cast<float>((high << 16) | remainder.low);
}

inline RemainderBits remainder_at(const MasterRemainder& remainder, std::size_t i) {
  const std::uint32_t bits = remainder.halves_up[i / 8];
  return {remainder.low[i], ((bits >> (i % 8)) & 1U) != 0};
}
inline void set_remainder(const MasterRemainder& remainder, std::size_t i, RemainderBits value) {
  const auto bit = static_cast<std::uint8_t>(1U << (i % 8));
  remainder.low[i] = value.low;
  std::uint8_t& byte = remainder.halves_up[i / 8];
  byte = static_cast<std::uint8_t>(value.half_up ? byte | bit : byte & ~bit);
}

// Elements [first, first + numel) of `target` = what the elements of `source` lose when they are
// rounded to bf16. An fp64 source is rounded to fp32 first. Errors: UsageError for a type that is
// no floating type.
void store_remainder(const MasterRemainder& target, Numel first, const std::byte* source,
                     DType source_dtype, Numel numel, ThreadPool* pool);

// masters[i] from weights[first + i], bf16, and its remainder.
void join_masters(std::span<float> masters, const std::byte* weights,
                  const MasterRemainder& remainder, Numel first = Numel());

}  // namespace strata::kernels
