#include "strata/format/checkpoint_index.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/format/json.h"
#include "strata/format/safetensors.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kIndexBytesMax = 100'000'000_B;

struct WeightFiles {
  struct Entry {
    std::string tensor;
    std::size_t file = 0;  // of `files`
  };
  std::vector<std::string> files;  // names, each once, in order
  std::vector<Entry> tensors;      // each once, in the order of their names
};

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

// Takes the map out of the text while it is read: with tens of thousands of tensors a tree, and a
// set of its keys, would take longer than all headers of the files.
WeightFiles take_map(std::string_view text, const std::string& path) {
  WeightFiles files;
  std::map<std::string, std::size_t> number_of_file;  // in the order of their first tensors
  JsonPlace file_of_tensor{.what = "a file"};
  file_of_tensor.text = [&](const std::string& file) {
    WeightFiles::Entry& entry = files.tensors.back();
    const auto [known, is_new] = number_of_file.emplace(file, number_of_file.size());
    if (is_new && !stays_in_folder(file)) {
      throw FormatError(fmt::format(
          "an index of a checkpoint names a file outside of its folder: path={} tensor={} file={}",
          path, in_quotes(entry.tensor), in_quotes(file)));
    }
    entry.file = known->second;
  };
  file_of_tensor.other = [&](std::string_view kind) {
    throw FormatError(
        fmt::format("an index of a checkpoint names no file for a tensor: path={} tensor={} "
                    "wanted=a string found={}",
                    path, in_quotes(files.tensors.back().tensor), kind));
  };
  bool found = false;
  JsonPlace map{.what = "an object"};
  map.member = [&](std::string& tensor) -> const JsonPlace& {
    files.tensors.push_back({std::move(tensor)});
    return file_of_tensor;
  };
  map.end = [&] { found = true; };
  map.other = JsonReader::kSkipped.other;
  JsonPlace top = JsonReader::kSkipped;
  top.member = [&](const std::string& key) -> const JsonPlace& {
    return key == "weight_map" ? map : JsonReader::kSkipped;
  };
  JsonReader reader(text, path, kIndex);
  reader.read(top);
  if (!found) fail_without_map(path);
  if (files.tensors.empty()) {
    throw FormatError(fmt::format(
        "an index of a checkpoint is empty: its 'weight_map' names no tensor: path={}", path));
  }
  if (!std::ranges::is_sorted(files.tensors, {}, &WeightFiles::Entry::tensor))
    std::ranges::sort(files.tensors, {}, &WeightFiles::Entry::tensor);
  const auto twice = std::ranges::adjacent_find(files.tensors, {}, &WeightFiles::Entry::tensor);
  if (twice != files.tensors.end()) reader.fail_twice(twice->tensor);
  std::vector<std::size_t> place(number_of_file.size());
  for (const auto& [file, number] : number_of_file) {
    place[number] = files.files.size();
    files.files.push_back(file);
  }
  for (WeightFiles::Entry& entry : files.tensors) entry.file = place[entry.file];
  return files;
}

SafetensorsHeader read_header(const io::File& file) {
  const Bytes file_bytes = file.size();
  std::array<std::byte, kHeaderLengthBytes.size()> start{};
  const std::span<std::byte> there =
      std::span(start).first(std::min(start.size(), file_bytes.size()));
  io::read_fully(file, Bytes(0), there);
  std::string json(safetensors_header_bytes(there, file_bytes, file.path()).size(), '\0');
  io::read_fully(file, kHeaderLengthBytes, std::as_writable_bytes(std::span(json)));
  return parse_safetensors_header(json, file_bytes, file.path());
}

// Headers that one rank reads at once: every rank of a host reads all of them.
constexpr unsigned kReadersMax = 8;

// A link into nowhere counts as missing; what cannot be asked for fails when it is opened, with
// errno.
bool is_there(const std::string& path) {
  std::error_code error;
  return fs::status(path, error).type() != fs::file_type::not_found;
}

constexpr Bytes kPiece = 1_MiB;

const CheckpointTensor& find_or_throw(const CheckpointIndex& checkpoint, std::string_view name) {
  const CheckpointTensor* tensor = checkpoint.find(name);
  if (tensor == nullptr) {
    throw FormatError(fmt::format("{}: there is no tensor {}", checkpoint.path(), in_quotes(name)));
  }
  return *tensor;
}

// Reads model.safetensors.index.json: the name of the file that holds each tensor. Bounded and
// checked: the file's size, the kinds of its values, keys that are there twice, names of files that
// lead out of the folder.
WeightFiles read_weight_map_json(const std::string& path) {
  const std::string text = read_text(path);
  return take_map(text, path);
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path)
    : file_(std::move(path), io::File::Mode::kRead),
      header_(read_header(file_)),
      by_name_(header_.tensors.size()) {
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  const auto before = [this](std::size_t a, std::size_t b) {
    return header_.tensors[a].name < header_.tensors[b].name;
  };
  if (!std::is_sorted(by_name_.begin(), by_name_.end(), before))
    std::sort(by_name_.begin(), by_name_.end(), before);
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](std::size_t i, std::string_view wanted) { return header_.tensors[i].name < wanted; });
  if (found == by_name_.end() || header_.tensors[*found].name != name) return nullptr;
  return &header_.tensors[*found];
}

CheckpointIndex::CheckpointIndex(const std::string& path) : path_(path) {
  std::error_code error;
  const std::string single = path + "/" + kSingleFileName;
  const std::string index = path + "/" + kIndexFileName;
  if (fs::is_regular_file(path, error)) {
    read_files({path});
  } else if (!is_there(path)) {
    throw FormatError(fmt::format("there is no checkpoint: no such file or folder: path={}", path));
  } else if (is_there(single)) {
    read_files({single});
  } else if (is_there(index)) {
    open_indexed(index);
  } else {
    throw FormatError(
        fmt::format("a folder holds no checkpoint; wanted {} or {} in it (weights of another "
                    "format are not read; save "
                    "them as safetensors first): path={}",
                    kSingleFileName, kIndexFileName, path));
  }
}

void CheckpointIndex::read_files(const std::vector<std::string>& paths) {
  std::vector<std::optional<SafetensorsFile>> opened(paths.size());
  const std::size_t cores = std::clamp(std::thread::hardware_concurrency(), 1U, kReadersMax);
  ThreadPool threads(static_cast<int>(std::clamp(paths.size(), std::size_t{1}, cores)));
  threads.parallel_for(
      static_cast<std::int64_t>(paths.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
          opened[i].emplace(paths[i]);
      });
  for (std::optional<SafetensorsFile>& file : opened) {
    for (const TensorInfo& info : file->tensors()) tensors_.push_back({files_.size(), info});
    files_.push_back(std::move(*file));
  }
  sort_names();
}

void CheckpointIndex::open_indexed(const std::string& index_path) {
  const WeightFiles wanted = read_weight_map_json(index_path);
  std::vector<std::string> paths;
  std::vector<std::string> missing;
  for (const std::string& file : wanted.files) {
    paths.push_back(path_ + "/" + file);
    if (!is_there(paths.back())) missing.push_back(in_quotes(file));
  }
  if (!missing.empty()) {
    throw FormatError(
        fmt::format("a checkpoint lacks files that its index names; is the download complete?: "
                    "path={} missing={} "
                    "files={}",
                    index_path, missing.size(), first_ten(missing)));
  }
  read_files(paths);  // refuses a tensor in two files, before those not named are dropped
  std::vector<std::string> absent;
  std::vector<bool> named(tensors_.size());
  auto next = by_name_.begin();
  for (const auto& [tensor, file] : wanted.tensors) {  // both are in the order of names
    const auto name_of = [this](std::size_t i) -> const std::string& {
      return tensors_[i].info.name;
    };
    while (next != by_name_.end() && name_of(*next) < tensor) ++next;
    if (next != by_name_.end() && name_of(*next) == tensor && tensors_[*next].file == file) {
      named[*next] = true;
    } else {
      absent.push_back(fmt::format("{} in {}", in_quotes(tensor), in_quotes(wanted.files[file])));
    }
  }
  if (!absent.empty()) {
    throw FormatError(
        fmt::format("files of a checkpoint lack tensors that its index says they hold: path={} "
                    "missing={} tensors={}",
                    index_path, absent.size(), first_ten(absent)));
  }
  if (wanted.tensors.size() < tensors_.size()) keep(named);
}

void CheckpointIndex::keep(const std::vector<bool>& wanted) {
  std::vector<CheckpointTensor> kept;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (wanted[i]) kept.push_back(std::move(tensors_[i]));
  }
  tensors_ = std::move(kept);
  sort_names();
}

void CheckpointIndex::sort_names() {
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  const auto name = [this](std::size_t i) -> const std::string& { return tensors_[i].info.name; };
  std::sort(by_name_.begin(), by_name_.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(name(a), tensors_[a].file) < std::tie(name(b), tensors_[b].file);
  });
  const auto twice =
      std::adjacent_find(by_name_.begin(), by_name_.end(),
                         [&](std::size_t a, std::size_t b) { return name(a) == name(b); });
  if (twice == by_name_.end()) return;
  throw FormatError(fmt::format(
      "two files of a checkpoint hold a tensor of one name: path={} tensor={} files={} and {}",
      path_, in_quotes(name(*twice)), files_[tensors_[*twice].file].path(),
      files_[tensors_[*std::next(twice)].file].path()));
}

std::vector<const io::File*> CheckpointIndex::open_files() const {
  std::vector<const io::File*> files;
  for (const SafetensorsFile& file : files_) files.push_back(&file.file());
  return files;
}

const CheckpointTensor* CheckpointIndex::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](std::size_t i, std::string_view wanted) { return tensors_[i].info.name < wanted; });
  if (found == by_name_.end() || tensors_[*found].info.name != name) return nullptr;
  return &tensors_[*found];
}

bool same_tensor(const CheckpointIndex& checkpoint, std::string_view one, std::string_view other) {
  const CheckpointTensor& a = find_or_throw(checkpoint, one);
  const CheckpointTensor& b = find_or_throw(checkpoint, other);
  if (a.info.dtype != b.info.dtype || a.info.shape != b.info.shape) return false;
  std::vector<std::byte> first(std::min(kPiece, a.info.bytes).size());
  std::vector<std::byte> second(first.size());
  for (Bytes at; at < a.info.bytes; at += kPiece) {
    const std::size_t count = std::min(kPiece, a.info.bytes - at).size();
    io::read_fully(checkpoint.files()[a.file].file(), a.info.offset + at,
                   std::span(first).first(count));
    io::read_fully(checkpoint.files()[b.file].file(), b.info.offset + at,
                   std::span(second).first(count));
    if (!std::equal(first.begin(), first.begin() + static_cast<std::ptrdiff_t>(count),
                    second.begin())) {
      return false;
    }
  }
  return true;
}

}  // namespace strata::format
