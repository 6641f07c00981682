#include "strata/kernels/states8.h"

namespace strata::kernels {

// In fp64, rounded once.
Map8::Map8(bool is_signed)
    : values{}, top(is_signed ? 128.0F : 255.0F), zero(is_signed ? 127.0F : 0.0F) {
  std::array<double, 256> magnitudes{};  // by number
  std::size_t first = 1;
  for (std::size_t decade = 0; decade < kDecades; ++decade) {
    const std::size_t bins = (is_signed ? std::size_t{1} : std::size_t{2}) << decade;
    const double unit = std::array{1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0}[decade];
    const auto count = static_cast<double>(bins);
    for (std::size_t bin = 0; bin < bins; ++bin)
      magnitudes[first + bin] = unit * (0.1 + 0.9 * (static_cast<double>(bin) + 0.5) / count);
    starts[decade] = static_cast<float>((magnitudes[first - 1] + magnitudes[first]) / 2);
    slopes[decade] = static_cast<float>(count / 0.9 / unit);
    offsets[decade] = static_cast<float>(static_cast<double>(first) - count / 9);
    first += bins;
    lasts[decade] = static_cast<float>(first - 1);
  }
  magnitudes[first] = 1.0;
  starts[kDecades] = static_cast<float>((magnitudes[first - 1] + 1.0) / 2);
  const auto middle = static_cast<std::size_t>(zero);
  for (std::size_t number = 0; number <= first; ++number) {
    values[middle + number] = static_cast<float>(magnitudes[number]);
    if (number <= middle) values[middle - number] = static_cast<float>(-magnitudes[number]);
  }
  values[middle] = 0.0F;
}

const Map8& signed_map8() {
  static const Map8 map(true);
  return map;
}

const Map8& unsigned_map8() {
  static const Map8 map(false);
  return map;
}

}  // namespace strata::kernels
