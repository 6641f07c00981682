#include "strata/format/weight_map_json.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

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

bool stays_in_folder(const std::string& file) {
  if (file.empty() || file.find('\0') != std::string::npos) return false;
  const std::filesystem::path path(file);
  if (path.is_absolute() || !path.has_filename()) return false;
  for (const auto& component : path) {
    if (component == ".." || component == ".") return false;
  }
  return true;
}

// Takes the map out of the text as it is parsed: with tens of thousands of tensors a tree of the
// library's, and a set of its keys, would take longer than all headers of the files.
class MapReader final : public nlohmann::json_sax<Json> {
 public:
  explicit MapReader(const std::string& path) : path_(path) {}

  WeightFiles take() {
    if (!found_) {
      throw FormatError(
          fmt::format("an index of a checkpoint has no object 'weight_map' that names each "
                      "tensor's file: path={}",
                      path_));
    }
    if (files_.tensors.empty()) {
      throw FormatError(fmt::format(
          "an index of a checkpoint is empty: its 'weight_map' names no tensor: path={}", path_));
    }
    if (!std::ranges::is_sorted(files_.tensors, {}, &WeightFiles::Entry::tensor))
      std::ranges::sort(files_.tensors, {}, &WeightFiles::Entry::tensor);
    const auto twice = std::ranges::adjacent_find(files_.tensors, {}, &WeightFiles::Entry::tensor);
    if (twice != files_.tensors.end()) fail_twice(twice->tensor);
    put_files_in_order();
    return std::move(files_);
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("boolean"); }
  bool number_integer(number_integer_t) override { return value("number"); }
  bool number_unsigned(number_unsigned_t) override { return value("number"); }
  bool number_float(number_float_t, const string_t&) override { return value("number"); }
  bool binary(binary_t&) override { return value("binary"); }
  bool string(string_t& text) override {
    if (depth_ != kInMap || !in_map_) return true;
    const std::size_t file = number_of(text);
    files_.tensors.push_back({std::move(tensor_), file});
    return true;
  }
  bool start_array(std::size_t) override {
    value("array");
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ == 1 && last_key_ == "weight_map") {
      in_map_ = true;
      found_ = true;
    }
    if (depth_ == kInMap) value("object");
    ++depth_;
    keys_.emplace_back();
    return true;
  }
  bool end_object() override {
    --depth_;
    keys_.pop_back();
    if (depth_ == 1) in_map_ = false;
    return true;
  }
  // The library keeps the last of two equal keys; here that is an error, since another reader may
  // keep the first and load other weights.
  bool key(string_t& key) override {
    if (depth_ == kInMap && in_map_) {
      tensor_ = std::move(key);
      return true;
    }
    if (!keys_.back().insert(key).second) fail_twice(key);
    if (depth_ == 1) last_key_ = std::move(key);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    throw FormatError(
        fmt::format("an index of a checkpoint is not valid JSON: path={} {}", path_, error.what()));
  }

 private:
  static constexpr int kInMap = 2;  // open objects and arrays around a member of the map

  [[noreturn]] void fail_twice(std::string_view key) const {
    throw FormatError(fmt::format("an index of a checkpoint has a key twice: path={} key={}", path_,
                                  in_quotes(key)));
  }

  // One that is no string.
  bool value(std::string_view kind) const {
    if (depth_ != kInMap || !in_map_) return true;
    throw FormatError(
        fmt::format("an index of a checkpoint names no file for a tensor: path={} tensor={} "
                    "wanted=a string found={}",
                    path_, in_quotes(tensor_), kind));
  }

  std::size_t number_of(const std::string& file) {
    const auto [known, is_new] = number_of_file_.emplace(file, number_of_file_.size());
    if (is_new && !stays_in_folder(file)) {
      throw FormatError(fmt::format(
          "an index of a checkpoint names a file outside of its folder: path={} tensor={} file={}",
          path_, in_quotes(tensor_), in_quotes(file)));
    }
    return known->second;
  }

  void put_files_in_order() {
    std::vector<std::size_t> place(number_of_file_.size());
    for (const auto& [file, number] : number_of_file_) {
      place[number] = files_.files.size();
      files_.files.push_back(file);
    }
    for (WeightFiles::Entry& entry : files_.tensors) entry.file = place[entry.file];
  }

  const std::string& path_;
  WeightFiles files_;
  std::map<std::string, std::size_t> number_of_file_;  // as they came
  std::string last_key_;                               // of the outermost object
  std::string tensor_;
  std::vector<std::set<std::string>> keys_;  // of open objects; the map's are in files_
  int depth_ = 0;                            // open objects and arrays
  bool in_map_ = false;
  bool found_ = false;
};

}  // namespace

WeightFiles read_weight_map_json(const std::string& path) {
  const std::string text = read_text(path);
  MapReader reader(path);
  Json::sax_parse(text, &reader);
  return reader.take();
}

}  // namespace strata::format
