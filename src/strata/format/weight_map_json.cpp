#include "strata/format/weight_map_json.h"

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

using Json = nlohmann::json;

std::string read_text(const std::string& path) {
  const io::File file(path, io::File::Mode::kRead);
  const Bytes bytes = file.size();
  if (bytes > kIndexBytesMax) {
    throw FormatError(
        fmt::format("an index of a checkpoint is larger than any may be: path={} found={} max={}",
                    path, bytes.value, kIndexBytesMax.value));
  }
  std::string text(bytes.size(), '\0');
  io::read_fully(file, Bytes(0), std::as_writable_bytes(std::span(text)));
  return text;
}

// The library keeps the last of two equal keys; here that is an error, since another reader may
// keep the first and load other weights.
Json parse_without_duplicates(const std::string& text, const std::string& path) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys_of_open_objects.emplace_back();
    if (event == Json::parse_event_t::object_end) keys_of_open_objects.pop_back();
    if (event == Json::parse_event_t::key &&
        !keys_of_open_objects.back().insert(value.get<std::string>()).second) {
      throw FormatError(fmt::format("an index of a checkpoint has a key twice: path={} key={}",
                                    path, in_quotes(value.get<std::string>())));
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& error) {
    throw FormatError(
        fmt::format("an index of a checkpoint is not valid JSON: path={} {}", path, error.what()));
  }
}

bool stays_in_folder(const std::string& file) {
  if (file.empty() || file.find('\0') != std::string::npos) return false;
  const std::filesystem::path path(file);
  if (path.is_absolute() || !path.has_filename()) return false;
  for (const auto& component : path) {
    if (component == ".." || component == ".") return false;
  }
  return true;
}

}  // namespace

FileOfTensor read_weight_map_json(const std::string& path) {
  const Json index = parse_without_duplicates(read_text(path), path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) {
    throw FormatError(
        fmt::format("an index of a checkpoint has no object 'weight_map' that names each tensor's "
                    "file: path={}",
                    path));
  }
  FileOfTensor files;
  for (const auto& [tensor, value] : map->items()) {
    if (!value.is_string()) {
      throw FormatError(
          fmt::format("an index of a checkpoint names no file for a tensor: path={} tensor={} "
                      "wanted=a string found={}",
                      path, in_quotes(tensor), value.type_name()));
    }
    const auto& file = value.get_ref<const std::string&>();
    if (!stays_in_folder(file)) {
      throw FormatError(fmt::format(
          "an index of a checkpoint names a file outside of its folder: path={} tensor={} file={}",
          path, in_quotes(tensor), in_quotes(file)));
    }
    files.emplace(tensor, file);
  }
  return files;
}

}  // namespace strata::format
