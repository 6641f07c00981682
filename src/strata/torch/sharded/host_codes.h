// States of 8 bits on the host, as tensors of codes and scales, and their way to numbers and back.
// Pure functions; a HostCodes owns its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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

inline std::span<float> floats_of(const at::Tensor& values) {
  return {values.mutable_data_ptr<float>(), static_cast<std::size_t>(values.numel())};
}

}  // namespace strata::torch
