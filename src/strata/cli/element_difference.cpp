#include "strata/cli/element_difference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "strata/base/error.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

bool is_float8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

template <typename T>
T element(std::span<const std::byte> bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// Wide enough for all integers: 64 bits and a sign. An element that is neither floating nor an
// integer counts as the number of its byte.
__extension__ using Wide = __int128;

Wide integer_at(std::span<const std::byte> bytes, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kInt64:
      return element<std::int64_t>(bytes, i);
    case DType::kInt32:
      return element<std::int32_t>(bytes, i);
    case DType::kInt16:
      return element<std::int16_t>(bytes, i);
    case DType::kInt8:
      return element<std::int8_t>(bytes, i);
    case DType::kUInt64:
      return element<std::uint64_t>(bytes, i);
    case DType::kUInt32:
      return element<std::uint32_t>(bytes, i);
    case DType::kUInt16:
      return element<std::uint16_t>(bytes, i);
    default:
      return element<std::uint8_t>(bytes, i);
  }
}

double distance(double a, double b) {
  if (std::isnan(a) || std::isnan(b))
    return std::isnan(a) == std::isnan(b) ? 0 : std::numeric_limits<double>::infinity();
  return a == b ? 0 : std::abs(a - b);
}

void note(ElementDifference& difference, double far, Numel at, double a, double b) {
  ++difference.differing.value;
  if (far <= difference.largest && difference.differing.value > 1) return;
  difference.largest = far;
  difference.at = at;
  difference.a = a;
  difference.b = b;
}

// The values in fp64, by way of `rounded_to`.
std::span<const double> widen(std::span<const std::byte> bytes, DType dtype,
                              std::optional<DType> rounded_to, std::vector<std::byte>& rounded,
                              std::vector<double>& wide) {
  const Numel count(Bytes(bytes.size()) / size_of(dtype));
  const std::byte* source = bytes.data();
  if (rounded_to && *rounded_to != dtype) {
    rounded.resize(bytes_of(count, *rounded_to).size());
    kernels::cast(rounded.data(), *rounded_to, source, dtype, count, nullptr);
    source = rounded.data();
    dtype = *rounded_to;
  }
  wide.resize(count.size());
  kernels::cast(std::as_writable_bytes(std::span(wide)).data(), DType::kFloat64, source, dtype,
                count, nullptr);
  return wide;
}

}  // namespace

bool comparable(DType a, DType b) {
  if (a == b) return true;
  if (is_floating(a) != is_floating(b)) return false;
  return !is_float8(a) && !is_float8(b);
}

void DifferenceMeter::add(std::span<const std::byte> a, DType a_dtype, std::span<const std::byte> b,
                          DType b_dtype, std::optional<DType> rounded_to, Numel first,
                          ElementDifference& difference) {
  STRATA_ASSERT(comparable(a_dtype, b_dtype));
  if (is_float8(a_dtype)) difference.has_values = false;
  if (a_dtype == b_dtype && std::memcmp(a.data(), b.data(), a.size()) == 0) return;
  const auto count = static_cast<std::size_t>(Bytes(a.size()) / size_of(a_dtype));
  if (!is_floating(a_dtype)) {
    for (std::size_t i = 0; i < count; ++i) {
      const Wide one = integer_at(a, a_dtype, i);
      const Wide other = integer_at(b, b_dtype, i);
      if (one == other) continue;
      const Wide far = one > other ? one - other : other - one;
      note(difference, static_cast<double>(far), first + Numel(i), static_cast<double>(one),
           static_cast<double>(other));
    }
    return;
  }
  const auto ones = widen(a, a_dtype, rounded_to, rounded_, a_);
  const auto others = widen(b, b_dtype, rounded_to, rounded_, b_);
  for (std::size_t i = 0; i < count; ++i) {
    const double far = distance(ones[i], others[i]);
    if (far > 0) note(difference, far, first + Numel(i), ones[i], others[i]);
  }
}

}  // namespace strata::cli
