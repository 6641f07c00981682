// Element types of tensors, with the names that safetensors files and DeepSpeed configs use.
// Pure functions; safe everywhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "strata/base/units.h"

namespace strata {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt64,
  kUInt32,
  kUInt16,
  kUInt8,
  kBool,
};

Bytes size_of(DType dtype);

inline Bytes bytes_of(Numel numel, DType dtype) {
  return size_of(dtype) * numel.value;
}

// fp32, fp16, bf16 or fp64: what master weights, kernels and reductions are defined for.
bool is_floating(DType dtype);

// "float32", "bfloat16", ...: as PyTorch prints it.
std::string_view name_of(DType dtype);

// "F32", "BF16", ...: as a safetensors header writes it.
std::string_view safetensors_name_of(DType dtype);
std::optional<DType> dtype_from_safetensors(std::string_view name);

// "fp32", "float32", "bf16", "bfloat16", "fp16", "float16", "half": as configs write it.
std::optional<DType> dtype_from_config(std::string_view name);

}  // namespace strata
