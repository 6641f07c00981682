#include "strata/format/weight_map_json.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/json_scanner.h"
#include "strata/format/message_text.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

constexpr JsonSubject kIndex{"an index of a checkpoint", "is not valid JSON", "index"};

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

bool stays_in_folder(const std::string& file) {
  if (file.empty() || file.find('\0') != std::string::npos) return false;
  const std::filesystem::path path(file);
  if (path.is_absolute() || !path.has_filename()) return false;
  for (const auto& component : path) {
    if (component == ".." || component == ".") return false;
  }
  return true;
}

[[noreturn]] void fail_without_map(const std::string& path) {
  throw FormatError(
      fmt::format("an index of a checkpoint has no object 'weight_map' that names each tensor's "
                  "file: path={}",
                  path));
}

// Takes the map out of the text while it is scanned: with tens of thousands of tensors a tree, and
// a set of its keys, would take longer than all headers of the files.
class MapReader {
 public:
  MapReader(std::string_view text, const std::string& path)
      : path_(path), scanner_(text, path, kIndex) {}

  WeightFiles run() {
    bool found = false;
    if (scanner_.kind() == "object") {
      scanner_.distinct_object("an object", [&](const std::string& key) {
        const bool map = key == "weight_map" && scanner_.kind() == "object";
        found = found || map;
        if (map) {
          scanner_.object("an object", [&](std::string tensor) { add(std::move(tensor)); });
        } else {
          scanner_.skip_value();
        }
      });
    } else {
      scanner_.skip_value();
    }
    scanner_.end();
    if (!found) fail_without_map(path_);
    if (files_.tensors.empty()) {
      throw FormatError(fmt::format(
          "an index of a checkpoint is empty: its 'weight_map' names no tensor: path={}", path_));
    }
    put_in_order();
    return std::move(files_);
  }

 private:
  void add(std::string tensor) {
    if (const std::string_view kind = scanner_.kind(); kind != "string") {
      throw FormatError(
          fmt::format("an index of a checkpoint names no file for a tensor: path={} tensor={} "
                      "wanted=a string found={}",
                      path_, in_quotes(tensor), kind));
    }
    const std::string file = scanner_.string("a file");
    const auto [known, is_new] = number_of_file_.emplace(file, number_of_file_.size());
    if (is_new && !stays_in_folder(file)) {
      throw FormatError(fmt::format(
          "an index of a checkpoint names a file outside of its folder: path={} tensor={} file={}",
          path_, in_quotes(tensor), in_quotes(file)));
    }
    files_.tensors.push_back({std::move(tensor), known->second});
  }

  void put_in_order() {
    if (!std::ranges::is_sorted(files_.tensors, {}, &WeightFiles::Entry::tensor))
      std::ranges::sort(files_.tensors, {}, &WeightFiles::Entry::tensor);
    const auto twice = std::ranges::adjacent_find(files_.tensors, {}, &WeightFiles::Entry::tensor);
    if (twice != files_.tensors.end()) scanner_.fail_twice(twice->tensor);
    std::vector<std::size_t> place(number_of_file_.size());
    for (const auto& [file, number] : number_of_file_) {
      place[number] = files_.files.size();
      files_.files.push_back(file);
    }
    for (WeightFiles::Entry& entry : files_.tensors) entry.file = place[entry.file];
  }

  const std::string& path_;
  JsonScanner scanner_;
  WeightFiles files_;
  std::map<std::string, std::size_t> number_of_file_;  // in the order of their first tensors
};

}  // namespace

WeightFiles read_weight_map_json(const std::string& path) {
  const std::string text = read_text(path);
  return MapReader(text, path).run();
}

}  // namespace strata::format
