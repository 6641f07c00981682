#include "strata/format/checkpoint_index.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/format/json.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kIndexBytesMax = 100'000'000_B;

struct WeightFiles {
  using Files = std::map<std::string, std::size_t>;
  struct Entry {
    std::string tensor;
    Files::const_iterator file;
  };
  Files files;                 // names, and their numbers in this order
  std::vector<Entry> tensors;  // each once, in the order of their names
};

constexpr std::string_view kIndexName = "an index of a checkpoint";
constexpr JsonSubject kIndex{kIndexName, "is not valid JSON", "index"};

bool stays_in_folder(const std::string& file) {
  if (file.empty() || file.find('\0') != std::string::npos) return false;
  const fs::path path(file);
  return !path.is_absolute() && path.has_filename() &&
         std::ranges::none_of(path, [](const fs::path& p) { return p == ".." || p == "."; });
}

// Reads model.safetensors.index.json: the name of the file that holds each tensor. Bounded and
// checked: the file's size, the kinds of its values, keys that are there twice, names of files that
// lead out of the folder. Takes the map out of the text while it is read: with tens of thousands of
// tensors a tree, and a set of its keys, would take longer than all headers of the files.
WeightFiles read_weight_map(const std::string& path) {
  const std::string text = read_text(path, kIndexName, kIndexBytesMax);
  WeightFiles files;
  JsonPlace file_of_tensor{.what = "a file"};
  file_of_tensor.text = [&](const std::string& file) {
    WeightFiles::Entry& entry = files.tensors.back();
    const auto [known, is_new] = files.files.emplace(file, 0);
    if (is_new && !stays_in_folder(file))
      throw FormatError(
          "an index of a checkpoint names a file outside of its folder: path={} tensor={} file={}",
          path, in_quotes(entry.tensor), in_quotes(file));
    entry.file = known;
  };
  file_of_tensor.other = [&](std::string_view kind) {
    throw FormatError(
        "an index of a checkpoint names no file for a tensor: path={} tensor={} wanted=a string "
        "found={}",
        path, in_quotes(files.tensors.back().tensor), kind);
  };
  bool found = false;
  JsonPlace map{.what = "an object"};
  map.member = [&](std::string& tensor) -> const JsonPlace& {
    files.tensors.push_back({std::move(tensor), {}});
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
  if (!found)
    throw FormatError(
        "an index of a checkpoint has no object 'weight_map' that names each tensor's file: "
        "path={}",
        path);
  if (files.tensors.empty())
    throw FormatError(
        "an index of a checkpoint is empty: its 'weight_map' names no tensor: path={}", path);
  if (!std::ranges::is_sorted(files.tensors, {}, &WeightFiles::Entry::tensor))
    std::ranges::sort(files.tensors, {}, &WeightFiles::Entry::tensor);
  const auto twice = std::ranges::adjacent_find(files.tensors, {}, &WeightFiles::Entry::tensor);
  if (twice != files.tensors.end()) reader.fail_twice(twice->tensor);
  std::size_t count = 0;
  for (auto& [file, number] : files.files) number = count++;
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

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path)
    : file_(std::move(path), io::File::Mode::kRead), header_(read_header(file_)) {}

CheckpointIndex::CheckpointIndex(const std::string& path) : path_(path) {
  std::error_code error;
  const std::string single = path + "/" + kSingleFileName;
  const std::string index = path + "/" + kIndexFileName;
  if (fs::is_regular_file(path, error)) {
    read_files({path});
  } else if (!is_there(path)) {
    throw FormatError("there is no checkpoint: no such file or folder: path={}", path);
  } else if (is_there(single)) {
    read_files({single});
  } else if (is_there(index)) {
    open_indexed(index);
  } else {
    throw FormatError(
        "a folder holds no checkpoint; wanted {} or {} in it (weights of another format are not "
        "read; save them as safetensors first): path={}",
        kSingleFileName, kIndexFileName, path);
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
  const WeightFiles wanted = read_weight_map(index_path);
  std::vector<std::string> paths;
  std::vector<std::string> missing;
  for (const auto& [file, number] : wanted.files) {
    paths.push_back(path_ + "/" + file);
    if (!is_there(paths.back())) missing.push_back(in_quotes(file));
  }
  if (!missing.empty())
    throw FormatError(
        "a checkpoint lacks files that its index names; is the download complete?: path={} "
        "missing={} files={}",
        index_path, missing.size(), first_ten(missing));
  read_files(paths);  // refuses a tensor in two files, before those not named are dropped
  std::vector<std::string> absent;
  std::vector<bool> named(tensors_.size());
  auto next = by_name_.begin();
  for (const auto& [tensor, file] : wanted.tensors) {  // both are in the order of names
    while (next != by_name_.end() && name(*next) < tensor) ++next;
    if (next != by_name_.end() && name(*next) == tensor && tensors_[*next].file == file->second)
      named[*next] = true;
    else
      absent.push_back(fmt::format("{} in {}", in_quotes(tensor), in_quotes(file->first)));
  }
  if (!absent.empty())
    throw FormatError(
        "files of a checkpoint lack tensors that its index says they hold: path={} missing={} "
        "tensors={}",
        index_path, absent.size(), first_ten(absent));
  if (wanted.tensors.size() == tensors_.size()) return;
  std::size_t tensor = 0;
  std::erase_if(tensors_, [&](const CheckpointTensor&) { return !named[tensor++]; });
  sort_names();
}

void CheckpointIndex::sort_names() {
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  std::ranges::sort(by_name_, {},
                    [this](std::size_t i) { return std::tie(name(i), tensors_[i].file); });
  const auto twice = std::ranges::adjacent_find(
      by_name_, {}, [this](std::size_t i) -> const std::string& { return name(i); });
  if (twice == by_name_.end()) return;
  throw FormatError(
      "two files of a checkpoint hold a tensor of one name: path={} tensor={} files={} and {}",
      path_, in_quotes(name(*twice)), files_[tensors_[*twice].file].path(),
      files_[tensors_[*std::next(twice)].file].path());
}

std::vector<const io::File*> CheckpointIndex::open_files() const {
  std::vector<const io::File*> files;
  for (const SafetensorsFile& file : files_) files.push_back(&file.file());
  return files;
}

const CheckpointTensor* CheckpointIndex::find(std::string_view wanted) const {
  const auto found = std::ranges::lower_bound(
      by_name_, wanted, {}, [this](std::size_t i) -> std::string_view { return name(i); });
  return found == by_name_.end() || name(*found) != wanted ? nullptr : &tensors_[*found];
}

bool same_tensor(const CheckpointIndex& checkpoint, std::string_view one, std::string_view other) {
  const auto find = [&](std::string_view name) -> const CheckpointTensor& {
    if (const CheckpointTensor* const tensor = checkpoint.find(name)) return *tensor;
    throw FormatError("{}: there is no tensor {}", checkpoint.path(), in_quotes(name));
  };
  const CheckpointTensor& a = find(one);
  const CheckpointTensor& b = find(other);
  if (a.info.dtype != b.info.dtype || a.info.shape != b.info.shape) return false;
  std::vector<std::byte> first;
  std::vector<std::byte> second;
  for (Bytes at; at < a.info.bytes; at += kPiece) {
    first.resize(std::min(kPiece, a.info.bytes - at).size());
    second.resize(first.size());
    io::read_fully(checkpoint.files()[a.file].file(), a.info.offset + at, first);
    io::read_fully(checkpoint.files()[b.file].file(), b.info.offset + at, second);
    if (first != second) return false;
  }
  return true;
}

}  // namespace strata::format
