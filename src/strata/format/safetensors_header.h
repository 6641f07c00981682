// The header of a safetensors file: 8 bytes little-endian length, a JSON object of that length,
// data. It is hostile input. It is accepted only if every byte of the data belongs to exactly one
// tensor whose dtype and shape explain its size; every way to lie has its own message. Pure
// functions over memory (the fuzz target calls them); safe everywhere. Errors: FormatError with
// path, tensor, what was wanted and what was found.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "strata/base/units.h"
#include "strata/format/tensor_info.h"

namespace strata::format {

inline constexpr Bytes kHeaderLengthBytes = 8_B;
inline constexpr Bytes kHeaderBytesMax = 100'000'000_B;  // as every reader of the format has it
inline constexpr std::size_t kRankMax = 64;              // PyTorch has no more dimensions

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by offset
  Metadata metadata;
};

// The length of the JSON by the first bytes of a file (eight, or all if it has fewer), checked
// against the file's size, so that nothing is allocated for a header that cannot be there.
Bytes safetensors_header_bytes(std::span<const std::byte> start, Bytes file_bytes,
                               std::string_view path);

// The JSON, of a file of `file_bytes`.
SafetensorsHeader parse_safetensors_header(std::string_view json, Bytes file_bytes,
                                           std::string_view path);

}  // namespace strata::format
