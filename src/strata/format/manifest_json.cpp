// The manifest as JSON. Tensors' extents are rows of numbers, since there are many of them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/manifest.h"
#include "strata/format/manifest_check.h"
#include "strata/format/message_text.h"

namespace strata::format {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "strata-checkpoint";
constexpr const char* kChannelsLast = "channels_last";

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

Json file_json(const ManifestFile& file) {
  return {{"name", file.name},
          {"bytes", file.bytes.value},
          {"block_bytes", file.checksums.block().value},
          {"xxh3", sums_text(file.checksums.sums())}};
}

std::string checksum_of_text(const Json& manifest) {
  const std::string text = manifest.dump();
  return checksum_text(checksum_of(std::as_bytes(std::span(text))));
}

// Members of one object, each asked for by its name and kind.
class Reader {
 public:
  Reader(const Json& json, std::string where, std::string_view path)
      : json_(json), where_(std::move(where)), path_(path) {
    if (!json.is_object()) fail("is no object");
  }

  const Json& member(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) fail(fmt::format("lacks '{}'", name));
    return *found;
  }
  const Json& array(const char* name) const {
    const Json& found = member(name);
    if (!found.is_array()) fail(fmt::format("has no list '{}'", name));
    return found;
  }
  std::string text(const char* name) const {
    const Json& found = member(name);
    if (!found.is_string()) fail(fmt::format("has no text '{}'", name));
    return found.get<std::string>();
  }
  std::int64_t number(const char* name) const { return as_number(member(name), name); }
  bool flag(const char* name) const {
    const Json& found = member(name);
    if (!found.is_boolean()) fail(fmt::format("has no true or false as '{}'", name));
    return found.get<bool>();
  }
  std::vector<std::string> texts(const char* name) const {
    std::vector<std::string> result;
    for (const Json& entry : array(name)) {
      if (!entry.is_string()) fail(fmt::format("has something else than text in '{}'", name));
      result.push_back(entry.get<std::string>());
    }
    return result;
  }
  std::int64_t as_number(const Json& json, const char* name) const {
    const bool fits = json.is_number_integer() &&
                      !(json.is_number_unsigned() && json.get<std::uint64_t>() > kLargest);
    if (!fits) fail(fmt::format("has no whole number as '{}'", name));
    return json.get<std::int64_t>();
  }
  DType dtype(const Json& json) const {
    const auto found =
        json.is_string() ? dtype_from_safetensors(json.get<std::string>()) : std::nullopt;
    if (!found) fail("has an unknown dtype");
    return *found;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError(fmt::format("the manifest of a checkpoint is damaged: {} {}: path={}", where_,
                                  what, path_));
  }

 private:
  static constexpr std::uint64_t kLargest = INT64_MAX;
  const Json& json_;
  std::string where_;
  std::string_view path_;
};

ManifestTensor tensor_from(const Json& json, std::string_view path) {
  const Reader reader(json, "a tensor", path);
  ManifestTensor tensor;
  tensor.name = reader.text("name");
  const std::string role = reader.text("role");
  const auto roles = {TensorRole::kParameter, TensorRole::kBuffer, TensorRole::kRankBuffer,
                      TensorRole::kClient};
  const auto found = std::ranges::find(roles, role, [](TensorRole r) { return name_of(r); });
  if (found == roles.end()) reader.fail("has an unknown role");
  tensor.role = *found;
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
  const Reader reader(json, "a file", path);
  std::vector<std::uint64_t> sums;
  if (!parse_sums(reader.text("xxh3"), sums)) reader.fail("has no hexadecimal digits as 'xxh3'");
  return {reader.text("name"), Bytes(reader.number("bytes")),
          BlockChecksums(Bytes(reader.number("block_bytes")), std::move(sums))};
}

ManifestRange extent_from(const Json& row, const Reader& reader) {
  constexpr std::size_t kColumns = 7;
  if (!row.is_array() || row.size() != kColumns) reader.fail("has an extent that is no row of 7");
  const auto number = [&](std::size_t i) { return reader.as_number(row[i], "extents"); };
  const auto index = [&](std::size_t i) { return static_cast<std::size_t>(number(i)); };
  return {index(0),         index(1),         reader.dtype(row[2]), index(3),
          Bytes(number(4)), Numel(number(5)), Numel(number(6))};
}

// Functions that walk JSON call themselves at every level, and the stack is finite.
constexpr int kNestingMax = 256;

bool nests_too_deeply(std::string_view json) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kNestingMax) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

// Before anything else of it is believed.
Json checked_json(std::string_view text, std::string_view path) {
  if (nests_too_deeply(text)) {
    throw FormatError(
        fmt::format("the manifest of a checkpoint is damaged: its lists and objects nest deeper "
                    "than {}: path={}",
                    kNestingMax, path));
  }
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    throw FormatError(
        fmt::format("the manifest of a checkpoint is not valid JSON (cut off, or not written by "
                    "Strata): path={}",
                    path));
  }
  const Reader reader(json, "it", path);
  if (reader.text("format") != kFormat) reader.fail("is of another format");
  const std::int64_t version = reader.number("version");
  if (version != Manifest::kVersion && version != Manifest::kVersionOfFormats) {
    throw FormatError(
        fmt::format("a checkpoint was written by another version of Strata: wanted format version "
                    "{}, found {}; "
                    "load it with the version that 'written_by' names: path={}",
                    Manifest::kVersionOfFormats, version, path));
  }
  const std::string checksum = reader.text("checksum");
  json.erase("checksum");
  if (checksum_of_text(json) != checksum) {
    throw FormatError(fmt::format(
        "the manifest of a checkpoint is not what was written (its checksum differs): path={}",
        path));
  }
  return json;
}

Json files_json(std::span<const ManifestFile> files) {
  Json list = Json::array();
  for (const ManifestFile& file : files) list.push_back(file_json(file));
  return list;
}

// Versions that do not know memory formats refuse a checkpoint that has some.
int version_of(const Manifest& manifest) {
  const bool any = std::ranges::any_of(manifest.tensors, &ManifestTensor::channels_last);
  return any ? Manifest::kVersionOfFormats : Manifest::kVersion;
}

Json extents_json(std::span<const ManifestRange> extents) {
  Json list = Json::array();
  for (const ManifestRange& e : extents) {
    list.push_back(Json::array({e.tensor, e.kind, safetensors_name_of(e.dtype), e.file,
                                e.offset.value, e.begin.value, e.end.value}));
  }
  return list;
}

}  // namespace

std::string to_text(const RankManifest& part) {
  return Json{{"files", files_json(part.files)}, {"extents", extents_json(part.extents)}}.dump();
}

RankManifest parse_manifest_part(std::string_view text) {
  const Json json = Json::parse(text);
  const Reader reader(json, "a rank's part", "");
  RankManifest part;
  for (const Json& entry : reader.array("files")) part.files.push_back(file_from(entry, ""));
  for (const Json& row : reader.array("extents")) part.extents.push_back(extent_from(row, reader));
  return part;
}

std::string to_text(const Manifest& manifest) {
  if (nests_too_deeply("{" + manifest.training)) {
    throw UsageError(fmt::format(
        "what a checkpoint saves of the training nests deeper than {} lists and objects; flatten "
        "the state that the script gives",
        kNestingMax));
  }
  Json json = {{"format", kFormat},
               {"version", version_of(manifest)},
               {"tag", manifest.tag},
               {"world_size", manifest.world_size},
               {"stage", manifest.stage},
               {"training", Json::parse(manifest.training)},
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
  const Reader reader(json, "it", path);
  Manifest manifest;
  manifest.tag = reader.text("tag");
  const auto small = [&](const char* name) {
    return static_cast<int>(std::clamp<std::int64_t>(reader.number(name), -1, INT32_MAX));
  };
  manifest.world_size = small("world_size");
  manifest.stage = small("stage");
  const Reader training(reader.member("training"), "'training'", path);
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
