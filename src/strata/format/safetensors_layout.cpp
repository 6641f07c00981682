#include "strata/format/safetensors_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string_view>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/format/safetensors_header.h"

namespace strata::format {
namespace {

constexpr Bytes kDataAlignment = 64_B;

TensorInfo info_of(const TensorSpec& spec) {
  const auto numel = checked_numel(spec.shape);
  const auto bytes = numel ? checked_bytes(*numel, spec.dtype) : std::nullopt;
  if (!bytes) {
    throw UsageError(fmt::format(
        "cannot write a tensor whose size does not fit 63 bits or is negative: tensor={} shape={}",
        in_quotes(spec.name), shape_text(spec.shape)));
  }
  return TensorInfo{.name = spec.name,
                    .dtype = spec.dtype,
                    .shape = spec.shape,
                    .numel = *numel,
                    .offset = {},
                    .bytes = *bytes};
}

void check_names(std::span<const TensorSpec> tensors) {
  std::set<std::string_view> names{"__metadata__"};
  for (const TensorSpec& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      throw UsageError(fmt::format(
          "cannot write two tensors of one name, nor one called '__metadata__': tensor={}",
          in_quotes(tensor.name)));
    }
  }
}

// JSON of a string; a name that is not UTF-8 cannot be written.
std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw UsageError(
        fmt::format("cannot write text that is not valid UTF-8: length={}", text.size()));
  }
}

// The offset still counts from the start of the data.
std::string entry_text(const TensorInfo& tensor) {
  return fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                     json_string(tensor.name), safetensors_name_of(tensor.dtype),
                     fmt::join(tensor.shape, ","), tensor.offset.value,
                     (tensor.offset + tensor.bytes).value);
}

std::string metadata_text(const Metadata& metadata) {
  std::string text = "\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (text.back() != '{') text += ',';
    text += json_string(key) + ':' + json_string(value);
  }
  return text + '}';
}

std::string length_prefix(std::size_t bytes) {
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix += static_cast<char>((bytes >> (8 * i)) & 0xFFU);
  return prefix;
}

}  // namespace

SafetensorsLayout lay_out_safetensors(std::span<const TensorSpec> tensors,
                                      const Metadata& metadata) {
  check_names(tensors);
  SafetensorsLayout layout;
  for (const TensorSpec& tensor : tensors) layout.tensors.push_back(info_of(tensor));
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
  });
  std::string json = "{";
  if (!metadata.empty()) json += metadata_text(metadata);
  Bytes reached;
  for (const std::size_t i : order) {
    TensorInfo& tensor = layout.tensors[i];
    tensor.offset = reached;
    if (__builtin_add_overflow(reached.value, tensor.bytes.value, &reached.value)) {
      throw UsageError("cannot write tensors whose bytes together do not fit 63 bits");
    }
    if (json.size() > 1) json += ',';
    json += entry_text(tensor);
  }
  json += '}';
  const Bytes data_begin = align_up(kHeaderLengthBytes + Bytes(json.size()), kDataAlignment);
  json.resize((data_begin - kHeaderLengthBytes).size(), ' ');
  if (Bytes(json.size()) > kHeaderBytesMax) {
    throw UsageError(
        fmt::format("the header of a safetensors file would be longer than any may be; write fewer "
                    "tensors a file: "
                    "wanted={} max={} tensors={}",
                    json.size(), kHeaderBytesMax.value, tensors.size()));
  }
  for (TensorInfo& tensor : layout.tensors) tensor.offset += data_begin;
  layout.head = length_prefix(json.size()) + json;
  layout.file_bytes = data_begin + reached;
  return layout;
}

}  // namespace strata::format
