// Elements of 16 bits as fp32, piece by piece. Private to this layer. Pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/kernels/elementwise.h"

namespace strata::kernels {

// Widened at once: four arrays of them fit the first two caches.
inline constexpr std::int64_t kWidened = 4096;

using WidenedPiece = std::array<float, kWidened>;

// Elements of an array as fp32: its own, or copies of them in `room`.
template <typename Byte>
auto in_fp32(Byte* array, DType dtype, Numel numel, WidenedPiece& room) {
  using Float = std::conditional_t<std::is_const_v<Byte>, const float, float>;
  if (dtype == DType::kFloat32) return std::span(reinterpret_cast<Float*>(array), numel.size());
  cast(reinterpret_cast<std::byte*>(room.data()), DType::kFloat32, array, dtype, numel, nullptr);
  return std::span<Float>(room.data(), numel.size());
}

// Elements that a thread takes at once: 28 bytes each, which is large beside the cost of handing
// them out, and small beside a shard. A multiple of 256, as scales and remainders want.
inline constexpr std::int64_t kUpdateGrain = 32768;

}  // namespace strata::kernels
