// libFuzzer target: the input is a safetensors file. Either it is refused with FormatError, or
// every tensor lies within it and the tensors cover its data; anything else is a crash.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace strata;
  const auto input = std::as_bytes(std::span(data, size));
  const Bytes file_bytes(size);
  try {
    const Bytes length = format::safetensors_header_bytes(
        input.first(std::min(size, format::kHeaderLengthBytes.size())), file_bytes, "fuzz");
    const auto json = input.subspan(format::kHeaderLengthBytes.size(), length.size());
    const auto header = format::parse_safetensors_header(
        std::string_view(reinterpret_cast<const char*>(json.data()), json.size()), file_bytes,
        "fuzz");
    Bytes reached = format::kHeaderLengthBytes + length;
    for (const format::TensorInfo& tensor : header.tensors) {
      STRATA_ASSERT(tensor.offset == reached);
      STRATA_ASSERT(tensor.bytes == bytes_of(tensor.numel, tensor.dtype));
      reached += tensor.bytes;
    }
    STRATA_ASSERT(reached == file_bytes);
  } catch (const FormatError&) {
  }
  return 0;
}
