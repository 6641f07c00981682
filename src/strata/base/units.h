// Units of size. Bytes and Numel (number of elements) are different types, so that a count of
// elements cannot be passed where bytes are meant; the raw number is reached by .value only.
// Immutable values; safe everywhere.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

namespace strata {

template <typename Tag>
struct Quantity {
  std::int64_t value = 0;

  constexpr Quantity() = default;
  explicit constexpr Quantity(std::int64_t v) : value(v) {}
  explicit constexpr Quantity(std::size_t v) : value(static_cast<std::int64_t>(v)) {}
  explicit constexpr Quantity(int v) : value(v) {}

  constexpr std::size_t size() const { return static_cast<std::size_t>(value); }
  constexpr auto operator<=>(const Quantity&) const = default;
  constexpr Quantity operator+(Quantity o) const { return Quantity(value + o.value); }
  constexpr Quantity operator-(Quantity o) const { return Quantity(value - o.value); }
  constexpr Quantity operator*(std::int64_t k) const { return Quantity(value * k); }
  constexpr Quantity operator/(std::int64_t k) const { return Quantity(value / k); }
  constexpr std::int64_t operator/(Quantity o) const { return value / o.value; }
  constexpr Quantity operator%(Quantity o) const { return Quantity(value % o.value); }
  constexpr Quantity& operator+=(Quantity o) {
    value += o.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity o) {
    value -= o.value;
    return *this;
  }
};

using Bytes = Quantity<struct BytesTag>;
using Numel = Quantity<struct NumelTag>;

constexpr Bytes operator""_B(unsigned long long v) {
  return Bytes(static_cast<std::int64_t>(v));
}
constexpr Bytes operator""_KiB(unsigned long long v) {
  return Bytes(static_cast<std::int64_t>(v) << 10);
}
constexpr Bytes operator""_MiB(unsigned long long v) {
  return Bytes(static_cast<std::int64_t>(v) << 20);
}
constexpr Bytes operator""_GiB(unsigned long long v) {
  return Bytes(static_cast<std::int64_t>(v) << 30);
}

// Smallest multiple of `alignment` (> 0) that is not below `v` (>= 0).
template <typename Tag>
constexpr Quantity<Tag> align_up(Quantity<Tag> v, Quantity<Tag> alignment) {
  return Quantity<Tag>((v.value + alignment.value - 1) / alignment.value * alignment.value);
}

// "512 B", "1.50 MiB", "21.2 GiB": three significant digits, binary prefixes.
std::string to_string(Bytes bytes);

}  // namespace strata
