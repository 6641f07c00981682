#include "strata/format/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/json.h"

namespace strata::format {
namespace {

constexpr std::size_t kShownBytesMax = 160;
constexpr std::size_t kShownItemsMax = 10;

constexpr JsonSubject kHeader{"the header of a safetensors file", "is broken", "header"};
constexpr std::string_view kMetadataKey = "__metadata__";

// An entry as the header has it: offsets count from the start of the data.
struct Entry {
  std::string name;
  std::optional<DType> dtype = {};
  std::optional<std::vector<std::int64_t>> shape = {};
  std::optional<std::vector<std::int64_t>> offsets = {};
};

template <typename... Args>
[[noreturn]] void fail(std::string_view path, std::string_view tensor,
                       fmt::format_string<Args...> problem, Args&&... args) {
  throw FormatError("a safetensors file lies about tensor {}: {}: path={}", in_quotes(tensor),
                    fmt::format(problem, std::forward<Args>(args)...), path);
}

DType dtype_of(const std::string& name, const Entry& entry, std::string_view path) {
  const std::optional<DType> dtype = dtype_from_safetensors(name);
  if (!dtype)
    fail(path, entry.name,
         "its dtype {} is not known; known are F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 "
         "U32 U16 U8 BOOL",
         in_quotes(name));
  return *dtype;
}

// The entries of a header, in its order, each with all that it needs.
std::vector<Entry> read_entries(JsonReader& reader, std::string_view path, Metadata& metadata) {
  using Place = const JsonPlace&;
  std::vector<Entry> entries;
  const auto entry = [&]() -> Entry& { return entries.back(); };
  JsonPlace dtype{.what = "a dtype in quotes"};
  dtype.text = [&](const std::string& text) { entry().dtype = dtype_of(text, entry(), path); };
  JsonPlace dimension{.what = "a dimension (an integer >= 0)"};
  dimension.integer = [&](std::int64_t number) { entry().shape->push_back(number); };
  JsonPlace shape{.what = "a shape in brackets"};
  shape.element = [&]() -> Place {
    if (entry().shape->size() == kRankMax)
      fail(path, entry().name, "its shape has more than {} dimensions", kRankMax);
    return dimension;
  };
  JsonPlace offset{.what = "an offset (an integer >= 0)"};
  offset.integer = [&](std::int64_t number) { entry().offsets->push_back(number); };
  JsonPlace offsets{.what = "data_offsets in brackets"};
  offsets.element = [&]() -> Place {
    if (entry().offsets->size() == 2)
      fail(path, entry().name, "data_offsets has more than two numbers");
    return offset;
  };
  offsets.end = [&] {
    const std::size_t count = entry().offsets->size();
    if (count != 2)
      fail(path, entry().name, "data_offsets has {} numbers, wanted two: begin and end", count);
  };
  JsonPlace tensor{.what = "a tensor's entry in braces"};
  tensor.member = [&](const std::string& key) -> Place {
    const auto once = [&](auto& field, Place place) -> Place {
      if (field) fail(path, entry().name, "its entry has the key '{}' twice", key);
      field.emplace();
      return place;
    };
    if (key == "dtype") return once(entry().dtype, dtype);
    if (key == "shape") return once(entry().shape, shape);
    if (key == "data_offsets") return once(entry().offsets, offsets);
    return JsonReader::kSkipped;  // the reference reader ignores it, too
  };
  tensor.end = [&] {
    if (!entry().dtype) fail(path, entry().name, "its entry has no 'dtype'");
    if (!entry().shape) fail(path, entry().name, "its entry has no 'shape'");
    if (!entry().offsets) fail(path, entry().name, "its entry has no 'data_offsets'");
  };
  std::string key_of_value;
  JsonPlace value{.what = "a string as value of __metadata__"};
  value.text = [&](std::string& text) {
    if (!metadata.emplace(key_of_value, std::move(text)).second)
      reader.fail(fmt::format("__metadata__ has the key {} twice", in_quotes(key_of_value)));
  };
  JsonPlace kept{.what = "metadata in braces"};
  kept.member = [&](const std::string& key) -> Place { return key_of_value = key, value; };
  bool metadata_seen = false;
  JsonPlace top{.what = "an object"};
  top.member = [&](std::string& key) -> Place {
    const bool is_metadata = key == kMetadataKey;
    if (is_metadata && std::exchange(metadata_seen, true))
      reader.fail("__metadata__ is there twice");
    if (!is_metadata) entries.push_back({std::move(key)});
    return is_metadata ? kept : tensor;
  };
  reader.read(top);
  return entries;
}

// The entry's tensor, checked by itself: the size fits dtype and shape, the range fits the data.
TensorInfo explain(Entry entry, Bytes data_begin, Bytes data_bytes, std::string_view path) {
  const std::string& name = entry.name;
  const DType dtype = *entry.dtype;
  std::vector<std::int64_t>& shape = *entry.shape;
  const std::int64_t begin = entry.offsets->front();
  const std::int64_t end = entry.offsets->back();
  const std::optional<Numel> numel = checked_numel(shape);
  if (!numel)
    fail(path, name, "its shape {} has more elements than 63 bits count", shape_text(shape));
  const std::optional<Bytes> bytes = checked_bytes(*numel, dtype);
  if (!bytes)
    fail(path, name, "its shape {} of {} has more bytes than 63 bits count", shape_text(shape),
         name_of(dtype));
  if (begin > end) fail(path, name, "it ends before it begins: begin={} end={}", begin, end);
  if (end > data_bytes.value)
    fail(path, name,
         "its data ends beyond the file, which is truncated or was not written to its end: "
         "begin={} end={} data_bytes={}",
         begin, end, data_bytes.value);
  if (end - begin != bytes->value)
    fail(path, name, "its size does not fit its shape {} of {}: wanted={} found={}",
         shape_text(shape), name_of(dtype), bytes->value, end - begin);
  return {std::move(entry.name),     dtype, std::move(shape), *numel,
          data_begin + Bytes(begin), *bytes};
}

void refuse_duplicate_names(const std::vector<Entry>& entries, std::string_view path) {
  std::vector<std::string_view> names;
  for (const Entry& entry : entries) names.emplace_back(entry.name);
  if (!std::ranges::is_sorted(names)) std::ranges::sort(names);  // most writers sort them
  const auto same = std::ranges::adjacent_find(names);
  if (same != names.end()) fail(path, *same, "the header names it twice");
}

// Every byte of the data belongs to exactly one tensor: no overlap, no hole, no rest. Room for
// hidden content is what makes a file able to be two things at once.
void demand_full_cover(const std::vector<TensorInfo>& tensors, Bytes data_begin, Bytes file_bytes,
                       std::string_view path) {
  Bytes reached = data_begin;
  std::string_view before;
  for (const TensorInfo& tensor : tensors) {
    const Bytes begin = tensor.offset - data_begin;
    if (tensor.offset < reached)
      fail(path, tensor.name, "its data overlaps that of {}: begin={} the other's end={}",
           in_quotes(before), begin.value, (reached - data_begin).value);
    if (tensor.offset > reached)
      fail(path, tensor.name, "a hole lies before its data: begin={} the data before ends at {}",
           begin.value, (reached - data_begin).value);
    reached = tensor.offset + tensor.bytes;
    before = tensor.name;
  }
  if (reached != file_bytes)
    throw FormatError(
        "a safetensors file has bytes at its end that belong to no tensor: path={} wanted={} "
        "found={}",
        path, reached.value, file_bytes.value);
}

constexpr Bytes kDataAlignment = 64_B;

TensorInfo info_of(const TensorSpec& spec) {
  const auto numel = checked_numel(spec.shape);
  const auto bytes = numel ? checked_bytes(*numel, spec.dtype) : std::nullopt;
  if (!bytes)
    throw UsageError(
        "cannot write a tensor whose size does not fit 63 bits or is negative: tensor={} shape={}",
        in_quotes(spec.name), shape_text(spec.shape));
  return {spec.name, spec.dtype, spec.shape, *numel, {}, *bytes};
}

void check_names(std::span<const TensorSpec> tensors) {
  std::set<std::string_view> names{kMetadataKey};
  for (const TensorSpec& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw UsageError(
          "cannot write two tensors of one name, nor one called '__metadata__': tensor={}",
          in_quotes(tensor.name));
  }
}

// JSON of a string; a name that is not UTF-8 cannot be written.
std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw UsageError("cannot write text that is not valid UTF-8: length={}", text.size());
  }
}

// The offset still counts from the start of the data.
std::string entry_text(const TensorInfo& tensor) {
  return fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                     json_string(tensor.name), safetensors_name_of(tensor.dtype),
                     fmt::join(tensor.shape, ","), tensor.offset.value,
                     (tensor.offset + tensor.bytes).value);
}

}  // namespace

std::optional<Numel> checked_numel(std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0)
      empty = true;
    else if (__builtin_mul_overflow(product, dimension, &product))
      return std::nullopt;
  }
  return Numel(empty ? 0 : product);
}

std::optional<Bytes> checked_bytes(Numel numel, DType dtype) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel.value, size_of(dtype).value, &bytes)) return std::nullopt;
  return Bytes(bytes);
}

std::string in_quotes(std::string_view text) {
  std::size_t cut = std::min(text.size(), kShownBytesMax);
  // Not within a UTF-8 sequence: messages must stay valid UTF-8.
  while (cut < text.size() && cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0U) == 0x80)
    --cut;
  std::string shown = "'";
  for (const char c : text.substr(0, cut)) {
    const unsigned byte = static_cast<unsigned char>(c);
    shown += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  shown += cut < text.size() ? fmt::format("...' ({} bytes)", text.size()) : "'";
  return shown;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string first_ten(std::span<const std::string> items) {
  const std::size_t count = std::min(items.size(), kShownItemsMax);
  std::string shown = fmt::format("{}", fmt::join(items.first(count), ", "));
  if (items.size() > count) shown += fmt::format(" and {} more", items.size() - count);
  return shown;
}

Bytes safetensors_header_bytes(std::span<const std::byte> start, Bytes file_bytes,
                               std::string_view path) {
  if (file_bytes < kHeaderLengthBytes || start.size() < kHeaderLengthBytes.size())
    throw FormatError(
        "not a safetensors file: it is shorter than the length of a header: path={} wanted={} "
        "found={}",
        path, kHeaderLengthBytes.value, file_bytes.value);
  std::uint64_t length = 0;
  for (std::size_t i = kHeaderLengthBytes.size(); i-- > 0;)
    length = length << 8U | std::to_integer<std::uint64_t>(start[i]);
  const auto room = static_cast<std::uint64_t>((file_bytes - kHeaderLengthBytes).value);
  if (length > static_cast<std::uint64_t>(kHeaderBytesMax.value))
    throw FormatError(
        "not a safetensors file: it claims a header longer than any may be: path={} claimed={} "
        "max={} file_bytes={}",
        path, length, kHeaderBytesMax.value, file_bytes.value);
  if (length > room)
    throw FormatError(
        "a safetensors file claims a header longer than itself; it is truncated or no safetensors "
        "file: path={} claimed={} file_bytes={}",
        path, length, file_bytes.value);
  return Bytes(static_cast<std::int64_t>(length));
}

SafetensorsHeader parse_safetensors_header(std::string_view json, Bytes file_bytes,
                                           std::string_view path) {
  const Bytes data_begin = kHeaderLengthBytes + Bytes(json.size());
  STRATA_ASSERT(data_begin <= file_bytes);
  JsonReader reader(json, path, kHeader);
  if (json.empty() || json.front() != '{') reader.fail("it does not begin with '{'");
  SafetensorsHeader header;
  std::vector<Entry> entries = read_entries(reader, path, header.metadata);
  refuse_duplicate_names(entries, path);
  header.tensors.reserve(entries.size());
  for (Entry& entry : entries)
    header.tensors.push_back(explain(std::move(entry), data_begin, file_bytes - data_begin, path));
  // Among those that begin at one place, the empty ones come first.
  std::ranges::stable_sort(header.tensors, {},
                           [](const TensorInfo& t) { return std::pair(t.offset, t.bytes); });
  demand_full_cover(header.tensors, data_begin, file_bytes, path);
  return header;
}

SafetensorsLayout lay_out_safetensors(std::span<const TensorSpec> tensors,
                                      const Metadata& metadata) {
  check_names(tensors);
  SafetensorsLayout layout;
  for (const TensorSpec& tensor : tensors) layout.tensors.push_back(info_of(tensor));
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](std::size_t i) { return size_of(tensors[i].dtype); });
  std::string json;
  for (const auto& [key, value] : metadata)
    json += fmt::format("{}{}:{}", json.empty() ? "" : ",", json_string(key), json_string(value));
  json = metadata.empty() ? "{" : fmt::format("{{\"{}\":{{{}}}", kMetadataKey, json);
  Bytes reached;
  for (const std::size_t i : order) {
    TensorInfo& tensor = layout.tensors[i];
    tensor.offset = reached;
    if (__builtin_add_overflow(reached.value, tensor.bytes.value, &reached.value))
      throw UsageError("cannot write tensors whose bytes together do not fit 63 bits");
    if (json.size() > 1) json += ',';
    json += entry_text(tensor);
  }
  json += '}';
  const Bytes data_begin = align_up(kHeaderLengthBytes + Bytes(json.size()), kDataAlignment);
  json.resize((data_begin - kHeaderLengthBytes).size(), ' ');
  if (Bytes(json.size()) > kHeaderBytesMax)
    throw UsageError(
        "the header of a safetensors file would be longer than any may be; write fewer tensors a "
        "file: wanted={} max={} tensors={}",
        json.size(), kHeaderBytesMax.value, tensors.size());
  for (TensorInfo& tensor : layout.tensors) tensor.offset += data_begin;
  for (int i = 0; i < 8; ++i) layout.head += static_cast<char>((json.size() >> (8 * i)) & 0xFFU);
  layout.head += json;
  layout.file_bytes = data_begin + reached;
  return layout;
}

}  // namespace strata::format
