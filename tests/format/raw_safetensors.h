// Bytes of safetensors files put together by hand, so that they can lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "strata/format/checkpoint_index.h"

namespace strata::testing {

inline std::string length_field(std::uint64_t length) {
  std::string field;
  for (unsigned i = 0; i < 8; ++i) field += static_cast<char>((length >> (8 * i)) & 0xFFU);
  return field;
}

inline std::string raw_safetensors(std::string_view json, std::size_t data_bytes) {
  return length_field(json.size()) + std::string(json) + std::string(data_bytes, 'd');
}

// Null if there is none of that name.
inline const format::TensorInfo* find(const format::SafetensorsFile& file, std::string_view name) {
  const auto found = std::ranges::find(file.tensors(), name, &format::TensorInfo::name);
  return found == file.tensors().end() ? nullptr : &*found;
}

}  // namespace strata::testing
