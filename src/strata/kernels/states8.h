// Optimizer states in 8 bits: a code for each element, and an fp32 scale for each block of 256
// elements, counted from a parameter's first one. A code is the number of a value in a dynamic map,
// which has the same relative precision over seven decades; the state is that value times the
// scale. A block's scale is the largest magnitude in it.
// Idea: Dettmers et al. 2021 (block-wise quantization, the dynamic map).
//
// Codes go to the nearest value of the map. With `keeps_positive` a positive second moment never
// becomes zero, which would make the next update as large as 1 / eps allows. The scalar functions
// here are the definition: all kernels give their bits.
//
// Threads: pure functions of their arrays. Errors: none.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace strata::kernels {

inline constexpr std::size_t kBlock8 = 256;  // elements that share a scale

inline std::size_t blocks8(std::size_t numel) {
  return (numel + kBlock8 - 1) / kBlock8;
}

// A map, and what finds the nearest of its values. Values count from zero: those of the signed map
// are mirrored, but for the largest. The magnitudes of decade i, from first(i) to last(i), divide
// it into equal parts. Kernels of devices get it by value.
struct Map8 {
  static constexpr int kDecades = 7;
  std::array<float, 256> values;  // by code
  // A relative magnitude above starts[i] belongs to decade i or a later one; above the last, to 1.
  std::array<float, kDecades + 1> starts;
  std::array<float, kDecades> slopes;  // its number is slope * magnitude + offset, rounded down
  std::array<float, kDecades> offsets;
  std::array<float, kDecades> lasts;  // but not more than this
  float top;                          // the number of 1
  float zero;                         // the code of zero: 127 in the signed map

  explicit Map8(bool is_signed);
};
static_assert(sizeof(Map8) == 4 * (256 + 8 + 3 * 7 + 2));

const Map8& signed_map8();
const Map8& unsigned_map8();

// A block's scale, and what magnitudes are multiplied by to be relative to it.
struct Scale8 {
  float scale = 0.0F;
  float inverse = 0.0F;

  explicit Scale8(float largest) {
    if (largest == 0.0F) return;
    // Between bounds whose inverse is finite and not zero.
    scale =
        std::clamp(largest, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
    inverse = 1.0F / scale;
  }
};

// The number of the value of `map` that is nearest to a relative magnitude.
inline float number8(const Map8& map, float magnitude) {
  if (magnitude > map.starts[Map8::kDecades]) return map.top;
  if (!(magnitude > map.starts[0])) return 0.0F;
  std::size_t decade = 0;
  while (decade + 1 < Map8::kDecades && magnitude > map.starts[decade + 1]) ++decade;
  const float position = std::fma(magnitude, map.slopes[decade], map.offsets[decade]);
  return std::min(std::trunc(position), map.lasts[decade]);
}

inline std::uint8_t code8(const Map8& map, float value, float inverse, bool keeps_positive) {
  float number = number8(map, std::fabs(value) * inverse);
  if (keeps_positive && value > 0.0F) number = std::max(number, 1.0F);
  if (map.zero == 0.0F) return static_cast<std::uint8_t>(number);
  return static_cast<std::uint8_t>(value < 0.0F ? map.zero - std::min(number, map.zero)
                                                : map.zero + number);
}

// A state of elements that begin at a block.
struct Codes8 {
  std::uint8_t* codes = nullptr;  // one an element
  float* scales = nullptr;        // one a block

  Codes8 from(std::size_t first) const { return {codes + first, scales + first / kBlock8}; }
};

inline void decode8(const Map8& map, const Codes8& state, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = map.values[state.codes[i]] * state.scales[i / kBlock8];
}

inline void encode8(const Map8& map, std::span<const float> values, const Codes8& state,
                    bool keeps_positive) {
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock8) {
    const std::span<const float> block =
        values.subspan(begin, std::min(kBlock8, values.size() - begin));
    float largest = 0.0F;
    for (const float value : block) largest = std::max(largest, std::fabs(value));
    const Scale8 scale(largest);
    state.scales[begin / kBlock8] = scale.scale;
    for (std::size_t i = 0; i < block.size(); ++i)
      state.codes[begin + i] = code8(map, block[i], scale.inverse, keeps_positive);
  }
}

// As encode8(), and for values that came from codes to these again. In a block that a negative
// value leads, that is the lowest of the map times a scale which is none of the values.
void encode_again(const Map8& map, std::span<const float> values, const Codes8& state,
                  bool keeps_positive);

}  // namespace strata::kernels
