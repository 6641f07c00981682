// The header of a safetensors file: 8 bytes little-endian length, a JSON object of that length,
// data. It is hostile input. It is accepted only if every byte of the data belongs to exactly one
// tensor whose dtype and shape explain its size; every way to lie has its own message. All here is
// pure (the fuzz target calls it) and safe everywhere. Errors: FormatError with path, tensor, what
// was wanted and what was found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

// Text of messages. Names come from files and may be anything: they are shown quoted, with control
// bytes escaped, and cut when long: 'model.norm.weight'; a shape: [2, 3]; the first ten of a list,
// and how many there are beyond: "a, b, ... and 3 more".
std::string in_quotes(std::string_view text);
std::string shape_text(std::span<const std::int64_t> shape);
std::string first_ten(std::span<const std::string> items);

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

// Where the tensors of a file to be written lie, and the header that says so. Wider elements come
// first, so that every tensor begins at a multiple of its element's size; the header is padded with
// spaces so that the data begins at a multiple of 64 bytes. UsageError for tensors that no
// safetensors file can hold (a name twice or "__metadata__", a shape that overflows, a header
// beyond the limit).
struct SafetensorsLayout {
  std::string head;                 // length and JSON: the file's first bytes
  std::vector<TensorInfo> tensors;  // as the caller ordered them
  Bytes file_bytes;
};

SafetensorsLayout lay_out_safetensors(std::span<const TensorSpec> tensors,
                                      const Metadata& metadata);

}  // namespace strata::format
