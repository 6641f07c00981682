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

void encode_again(const Map8& map, std::span<const float> values, const Codes8& state,
                  bool keeps_positive) {
  encode8(map, values, state, keeps_positive);
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock8) {
    const auto block = values.subspan(begin, std::min(kBlock8, values.size() - begin));
    const Codes8 there = state.from(begin);
    const auto is_exact = [&] {
      for (std::size_t i = 0; i < block.size(); ++i)
        if (map.values[there.codes[i]] * there.scales[0] != block[i]) return false;
      return true;
    };
    const float lowest = std::ranges::min(block);
    if (lowest >= 0.0F || -lowest != there.scales[0] || is_exact()) continue;
    float scale = std::nextafter(std::nextafter(lowest / map.values[0], 0.0F), 0.0F);
    for (int i = 0; i < 5 && !is_exact(); ++i, scale = std::nextafter(scale, 2 * scale)) {
      there.scales[0] = scale;
      for (std::size_t k = 0; k < block.size(); ++k)
        there.codes[k] = code8(map, block[k], 1.0F / scale, keeps_positive);
    }
    if (!is_exact()) encode8(map, block, there, keeps_positive);
  }
}

}  // namespace strata::kernels
