// Where the tensors of a file to be written lie, and the header that says so. Wider elements come
// first, so that every tensor begins at a multiple of its element's size; the header is padded with
// spaces so that the data begins at a multiple of 64 bytes. Pure; safe everywhere. Errors:
// UsageError for tensors that no safetensors file can hold (a name twice or "__metadata__", a shape
// that overflows, a header beyond the format's limit).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "strata/format/tensor_info.h"

namespace strata::format {

struct SafetensorsLayout {
  std::string head;                 // length and JSON: the file's first bytes
  std::vector<TensorInfo> tensors;  // as the caller ordered them
  Bytes file_bytes;
};

SafetensorsLayout lay_out_safetensors(std::span<const TensorSpec> tensors,
                                      const Metadata& metadata);

}  // namespace strata::format
