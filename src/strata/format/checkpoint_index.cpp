#include "strata/format/checkpoint_index.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/format/message_text.h"
#include "strata/format/shard_plan.h"
#include "strata/format/weight_map_json.h"

namespace strata::format {
namespace fs = std::filesystem;

namespace {

// Headers that one rank reads at once: every rank of a host reads all of them.
constexpr unsigned kReadersMax = 8;

// A link into nowhere counts as missing; what cannot be asked for fails when it is opened, with
// errno.
bool is_there(const std::string& path) {
  std::error_code error;
  return fs::status(path, error).type() != fs::file_type::not_found;
}

}  // namespace

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

}  // namespace strata::format
