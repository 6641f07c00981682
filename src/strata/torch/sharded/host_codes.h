// States of 8 bits on the host, as tensors of codes and scales, and their way to numbers and back.
// Pure functions; a HostCodes owns its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "strata/kernels/states8.h"
#include "strata/plan/update_rule.h"

namespace strata::torch {

inline const kernels::Map8& map_of(std::string_view state) {
  return state == plan::kExpAvgSq ? kernels::unsigned_map8() : kernels::signed_map8();
}

// Codes and scales of a state of 8 bits, on the host.
struct HostCodes {
  at::Tensor codes;
  at::Tensor scales;

  explicit HostCodes(std::int64_t numel)
      : codes(at::empty({numel}, at::kByte)),
        scales(at::empty(
            {static_cast<std::int64_t>(kernels::blocks8(static_cast<std::size_t>(numel)))},
            at::kFloat)) {}
  kernels::Codes8 state() const {
    return {codes.mutable_data_ptr<std::uint8_t>(), scales.mutable_data_ptr<float>()};
  }
};

// As encode8(), and for values that came from codes to these again. In a block that a negative
// value leads, that is the lowest of the map times a scale which is none of the values.
inline void encode_again(const kernels::Map8& map, std::span<const float> values,
                         const kernels::Codes8& state, bool keeps_positive) {
  kernels::encode8(map, values, state, keeps_positive);
  for (std::size_t begin = 0; begin < values.size(); begin += kernels::kBlock8) {
    const auto block = values.subspan(begin, std::min(kernels::kBlock8, values.size() - begin));
    const kernels::Codes8 there = state.from(begin);
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
        there.codes[k] = kernels::code8(map, block[k], 1.0F / scale, keeps_positive);
    }
    if (!is_exact()) kernels::encode8(map, block, there, keeps_positive);
  }
}

inline std::span<float> floats_of(const at::Tensor& values) {
  return {values.mutable_data_ptr<float>(), static_cast<std::size_t>(values.numel())};
}

}  // namespace strata::torch
