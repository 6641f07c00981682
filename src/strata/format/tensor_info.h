// The description of one tensor in a safetensors file, for readers and writers. Shapes come from
// files and are checked for overflow here. Values; safe everywhere.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata::format {

using Metadata = std::map<std::string, std::string>;

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
};

struct TensorInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  Numel numel;
  Bytes offset;  // of its first byte, from the start of the file
  Bytes bytes;
};

// The product of the dimensions; none if a dimension is negative, or if the product of those that
// are not 0 leaves 63 bits (a shape with a 0 in it must not hide an absurd one).
std::optional<Numel> checked_numel(std::span<const std::int64_t> shape);

// numel * element size; none if it leaves 63 bits.
std::optional<Bytes> checked_bytes(Numel numel, DType dtype);

}  // namespace strata::format
