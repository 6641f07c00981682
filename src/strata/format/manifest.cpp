#include "strata/format/manifest.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "strata/format/json.h"
#include "strata/format/safetensors.h"

namespace strata::format {
namespace {

template <typename... Args>
[[noreturn]] void damaged(std::string_view path, fmt::format_string<Args...> what, Args&&... args) {
  throw FormatError("the manifest of a checkpoint is damaged: {}: path={}",
                    fmt::format(what, std::forward<Args>(args)...), path);
}

void check_names(const Manifest& manifest, std::string_view path) {
  std::set<std::string_view> kinds;
  for (const std::string& kind : manifest.kinds) {
    if (kind.empty() || !kinds.insert(kind).second)
      damaged(path, "the kind {} is empty or there twice", in_quotes(kind));
  }
  if (manifest.kinds.empty() || manifest.kinds.front() != kValue)
    damaged(path, "its first kind is not 'value'");
  std::set<std::pair<TensorRole, std::string_view>> names;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (!names.emplace(tensor.role, tensor.name).second)
      damaged(path, "tensor {} is there twice", in_quotes(tensor.name));
    if (!checked_numel(tensor.shape))
      damaged(path, "tensor {} has no possible shape", in_quotes(tensor.name));
  }
  std::set<std::string_view> files;
  for (const ManifestFile& file : manifest.files) {
    if (!is_plain_file_name(file.name) || !files.insert(file.name).second)
      damaged(path, "file {} lies outside of the folder or is there twice", in_quotes(file.name));
    if (!file.checksums.fits(file.bytes))
      damaged(path, "file {} of {} bytes has {} checksums of {} bytes each", in_quotes(file.name),
              file.bytes.value, file.checksums.sums().size(), file.checksums.block().value);
  }
}

void check_extent(const Manifest& manifest, const ManifestRange& extent, std::string_view path) {
  if (extent.tensor >= manifest.tensors.size() || extent.kind >= manifest.kinds.size() ||
      extent.file >= manifest.files.size()) {
    damaged(path, "an extent is of a tensor, kind or file that is not there");
  }
  const ManifestTensor& tensor = manifest.tensors[extent.tensor];
  const ManifestFile& file = manifest.files[extent.file];
  const Numel numel = numel_of(manifest.kinds[extent.kind], *checked_numel(tensor.shape));
  const bool within_tensor =
      extent.begin.value >= 0 && extent.begin < extent.end && extent.end <= numel;
  if (!within_tensor)
    damaged(path, "elements [{}, {}) of tensor {} are not among its {}", extent.begin.value,
            extent.end.value, in_quotes(tensor.name), numel.value);
  const auto bytes = checked_bytes(extent.end - extent.begin, extent.dtype);
  if (!bytes || extent.offset.value < 0 || *bytes > file.bytes ||
      extent.offset > file.bytes - *bytes || extent.offset % size_of(extent.dtype) != Bytes()) {
    damaged(path, "elements [{}, {}) of tensor {} at {} do not fit file {} of {} bytes",
            extent.begin.value, extent.end.value, in_quotes(tensor.name), extent.offset.value,
            in_quotes(file.name), file.bytes.value);
  }
}

// One behind the other in a file, and one behind the other in a tensor.
void check_cover(const Manifest& manifest, std::string_view path) {
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::pair<Numel, Numel>>> parts;
  const ManifestRange* before = nullptr;
  for (const ManifestRange& extent : manifest.extents) {
    if (before != nullptr && before->file == extent.file && end_of(*before) > extent.offset)
      damaged(path, "extents overlap in file {} at {}", in_quotes(manifest.files[extent.file].name),
              extent.offset.value);
    if (before != nullptr && before->file > extent.file) damaged(path, "extents are not in order");
    parts[{extent.tensor, extent.kind}].emplace_back(extent.begin, extent.end);
    before = &extent;
  }
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
    if (checked_numel(manifest.tensors[t].shape)->value > 0 && !parts.contains({t, 0}))
      damaged(path, "tensor {} has no values", in_quotes(manifest.tensors[t].name));
  }
  for (auto& [key, ranges] : parts) {
    const ManifestTensor& tensor = manifest.tensors[key.first];
    std::ranges::sort(ranges);
    Numel at;
    for (const auto& [begin, end] : ranges) {
      if (begin != at)
        damaged(path, "tensor {} ({}) has elements twice or a hole at {}", in_quotes(tensor.name),
                manifest.kinds[key.second], std::min(begin, at).value);
      at = end;
    }
    if (at != numel_of(manifest.kinds[key.second], *checked_numel(tensor.shape)))
      damaged(path, "tensor {} ({}) ends at element {}", in_quotes(tensor.name),
              manifest.kinds[key.second], at.value);
  }
}

// Checks the rules of a manifest (manifest.h), for any JSON.
void check_manifest(const Manifest& manifest, std::string_view path) {
  if (manifest.world_size < 1 || manifest.stage < 0 || manifest.stage > 3)
    damaged(path, "a world size of {} at stage {}", manifest.world_size, manifest.stage);
  check_names(manifest, path);
  for (const ManifestRange& extent : manifest.extents) check_extent(manifest, extent, path);
  check_cover(manifest, path);
}

// The manifest as JSON. Tensors' extents are rows of numbers, since there are many of them.

using Json = nlohmann::json;

constexpr const char* kFormat = "strata-checkpoint";
constexpr const char* kChannelsLast = "channels_last";
constexpr int kNestingMax = 256;
constexpr std::array<std::string_view, 4> kRoleNames{"parameter", "buffer", "rank buffer",
                                                     "client"};
constexpr std::size_t kDigits = 16;

// A file's sums as hexadecimal digits, 16 a block, and back.
std::string sums_text(std::span<const std::uint64_t> sums) {
  std::string text;
  text.reserve(sums.size() * kDigits);
  for (const std::uint64_t sum : sums) text += checksum_text(sum);
  return text;
}

// Absent where the text is no such thing.
std::optional<std::vector<std::uint64_t>> parse_sums(std::string_view text) {
  std::vector<std::uint64_t> sums;
  if (text.size() % kDigits != 0) return std::nullopt;
  for (; !text.empty(); text.remove_prefix(kDigits)) {
    const char* end = text.data() + kDigits;
    const auto [stop, error] = std::from_chars(text.data(), end, sums.emplace_back(), 16);
    if (error != std::errc() || stop != end) return std::nullopt;
  }
  return sums;
}

Json tensor_json(const ManifestTensor& tensor) {
  Json json = {{"name", tensor.name},
               {"role", name_of(tensor.role)},
               {"shape", tensor.shape},
               {"dtype", safetensors_name_of(tensor.dtype)},
               {"trainable", tensor.trainable}};
  if (!tensor.aliases.empty()) json["aliases"] = tensor.aliases;
  if (tensor.channels_last) json["memory_format"] = kChannelsLast;
  return json;
}

std::string checksum_of_text(const Json& manifest) {
  const std::string text = manifest.dump();
  return checksum_text(checksum_of(std::as_bytes(std::span(text))));
}

JsonMembers members_of(const Json& json, std::string_view where, std::string_view path) {
  return {json, fmt::format("the manifest of a checkpoint is damaged: {}", where), path};
}

ManifestTensor tensor_from(const Json& json, std::string_view path) {
  const JsonMembers reader = members_of(json, "a tensor", path);
  ManifestTensor tensor;
  tensor.name = reader.text("name");
  const auto role = std::ranges::find(kRoleNames, reader.text("role"));
  if (role == kRoleNames.end()) reader.fail("has an unknown role");
  tensor.role = static_cast<TensorRole>(role - kRoleNames.begin());
  for (const Json& size : reader.array("shape"))
    tensor.shape.push_back(reader.as_number(size, "shape"));
  tensor.dtype = reader.dtype(reader.member("dtype"));
  tensor.trainable = reader.flag("trainable");
  if (json.contains("aliases")) tensor.aliases = reader.texts("aliases");
  tensor.channels_last = json.contains("memory_format");
  if (tensor.channels_last &&
      (reader.text("memory_format") != kChannelsLast || tensor.shape.size() < 3)) {
    reader.fail("has an unknown memory_format");
  }
  return tensor;
}

ManifestFile file_from(const Json& json, std::string_view path) {
  const JsonMembers reader = members_of(json, "a file", path);
  auto sums = parse_sums(reader.text("xxh3"));
  if (!sums) reader.fail("has no hexadecimal digits as 'xxh3'");
  return {reader.text("name"), Bytes(reader.number("bytes")),
          BlockChecksums(Bytes(reader.number("block_bytes")), std::move(*sums))};
}

ManifestRange extent_from(const Json& row, const JsonMembers& reader) {
  constexpr std::size_t kColumns = 7;
  if (!row.is_array() || row.size() != kColumns) reader.fail("has an extent that is no row of 7");
  const auto number = [&](std::size_t i) { return reader.as_number(row[i], "extents"); };
  const auto index = [&](std::size_t i) { return static_cast<std::size_t>(number(i)); };
  return {index(0),         index(1),         reader.dtype(row[2]), index(3),
          Bytes(number(4)), Numel(number(5)), Numel(number(6))};
}

// A tree whose lists and objects nest at most `nesting_max` deep, since functions that walk a tree
// call themselves at every level; a discarded value where the text is no JSON. Calls `too_deep`,
// which throws, for a text that nests deeper.
Json parse_tree(std::string_view text, int nesting_max, const std::function<void()>& too_deep) {
  const auto look = [&](int depth, Json::parse_event_t event, Json& /*value*/) {
    const bool begins =
        event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (begins && depth >= nesting_max) too_deep();
    return true;
  };
  return Json::parse(text, look, /*allow_exceptions=*/false);
}

// Before anything else of it is believed.
Json checked_json(std::string_view text, std::string_view path) {
  Json json = parse_tree(text, kNestingMax, [&] {
    damaged(path, "its lists and objects nest deeper than {}", kNestingMax);
  });
  if (json.is_discarded() || !json.is_object())
    throw FormatError(
        "the manifest of a checkpoint is not valid JSON (cut off, or not written by Strata): "
        "path={}",
        path);
  const JsonMembers reader = members_of(json, "it", path);
  if (reader.text("format") != kFormat) reader.fail("is of another format");
  const std::int64_t version = reader.number("version");
  if (version != Manifest::kVersion && version != Manifest::kVersionOfFormats)
    throw FormatError(
        "a checkpoint was written by another version of Strata: wanted format version {}, found "
        "{}; load it with the version that 'written_by' names: path={}",
        Manifest::kVersionOfFormats, version, path);
  const std::string checksum = reader.text("checksum");
  json.erase("checksum");
  if (checksum_of_text(json) != checksum)
    throw FormatError(
        "the manifest of a checkpoint is not what was written (its checksum differs): path={}",
        path);
  return json;
}

Json files_json(std::span<const ManifestFile> files) {
  Json list = Json::array();
  for (const ManifestFile& file : files)
    list.push_back({{"name", file.name},
                    {"bytes", file.bytes.value},
                    {"block_bytes", file.checksums.block().value},
                    {"xxh3", sums_text(file.checksums.sums())}});
  return list;
}

Json extents_json(std::span<const ManifestRange> extents) {
  Json list = Json::array();
  for (const ManifestRange& e : extents)
    list.push_back(Json::array({e.tensor, e.kind, safetensors_name_of(e.dtype), e.file,
                                e.offset.value, e.begin.value, e.end.value}));
  return list;
}

}  // namespace

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_text(std::uint64_t checksum) {
  return fmt::format("{:016x}", checksum);
}

std::string_view name_of(TensorRole role) {
  return kRoleNames[static_cast<std::size_t>(role)];
}

std::vector<std::string> owners_of(const Manifest& manifest, std::size_t file, Bytes begin,
                                   Bytes end) {
  const auto& extents = manifest.extents;
  // Extents lie one behind the other, so their ends are in order, too.
  auto extent = std::ranges::partition_point(extents, [&](const ManifestRange& e) {
    return e.file < file || (e.file == file && end_of(e) <= begin);
  });
  std::vector<std::string> owners;
  for (; extent != extents.end() && extent->file == file && extent->offset < end; ++extent)
    owners.push_back(fmt::format("tensor {} ({})", in_quotes(manifest.tensors[extent->tensor].name),
                                 manifest.kinds[extent->kind]));
  return owners;
}

bool is_plain_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 200;
  if (name.empty() || name.size() > kLongest || name.front() == '.') return false;
  return std::ranges::none_of(name, [](char c) {
    return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
}

void append(Manifest& manifest, RankManifest part) {
  const std::size_t before = manifest.files.size();
  for (ManifestFile& file : part.files) manifest.files.push_back(std::move(file));
  for (ManifestRange& extent : part.extents) {
    extent.file += before;
    manifest.extents.push_back(extent);
  }
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestName);
  require_inside(folder, path);
  return parse_manifest(read_text(path, "the manifest of a checkpoint", kManifestBytesMax), path);
}

void require_inside(const std::string& folder, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  const fs::path home = error ? fs::path() : fs::canonical(folder, error);
  if (error || file.parent_path() == home) return;
  throw FormatError(
      "a file of a checkpoint is a link that leads out of its folder; copy it there if it belongs "
      "to it: path={} leads to={}",
      path, file.string());
}

std::string to_text(const RankManifest& part) {
  return Json{{"files", files_json(part.files)}, {"extents", extents_json(part.extents)}}.dump();
}

RankManifest parse_manifest_part(std::string_view text) {
  const Json json = Json::parse(text);
  const JsonMembers reader = members_of(json, "a rank's part", "");
  RankManifest part;
  for (const Json& entry : reader.array("files")) part.files.push_back(file_from(entry, ""));
  for (const Json& row : reader.array("extents")) part.extents.push_back(extent_from(row, reader));
  return part;
}

std::string to_text(const Manifest& manifest) {
  Json training = parse_tree(manifest.training, kNestingMax - 1, [] {
    throw UsageError(
        "what a checkpoint saves of the training nests deeper than {} lists and objects; flatten "
        "the state that the script gives",
        kNestingMax);
  });
  if (training.is_discarded()) training = Json::parse(manifest.training);  // says why it is no JSON
  // Versions that do not know memory formats refuse a checkpoint that has some.
  const bool formats = std::ranges::any_of(manifest.tensors, &ManifestTensor::channels_last);
  Json json = {{"format", kFormat},
               {"version", formats ? Manifest::kVersionOfFormats : Manifest::kVersion},
               {"tag", manifest.tag},
               {"world_size", manifest.world_size},
               {"stage", manifest.stage},
               {"training", std::move(training)},
               {"kinds", manifest.kinds},
               {"tensors", Json::array()},
               {"files", files_json(manifest.files)},
               {"extents", extents_json(manifest.extents)}};
  for (const ManifestTensor& tensor : manifest.tensors)
    json["tensors"].push_back(tensor_json(tensor));
  json["checksum"] = checksum_of_text(json);
  return json.dump() + "\n";
}

Manifest parse_manifest(std::string_view text, std::string_view path) {
  const Json json = checked_json(text, path);
  const JsonMembers reader = members_of(json, "it", path);
  Manifest manifest;
  manifest.tag = reader.text("tag");
  const auto small = [&](const char* name) {
    return static_cast<int>(std::clamp<std::int64_t>(reader.number(name), -1, INT32_MAX));
  };
  manifest.world_size = small("world_size");
  manifest.stage = small("stage");
  members_of(reader.member("training"), "'training'", path);  // an object
  manifest.training = reader.member("training").dump();
  manifest.kinds = reader.texts("kinds");
  for (const Json& entry : reader.array("tensors"))
    manifest.tensors.push_back(tensor_from(entry, path));
  for (const Json& entry : reader.array("files")) manifest.files.push_back(file_from(entry, path));
  for (const Json& row : reader.array("extents"))
    manifest.extents.push_back(extent_from(row, reader));
  check_manifest(manifest, path);
  return manifest;
}

}  // namespace strata::format
