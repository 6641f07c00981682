#include "strata/format/checkpoint_index.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/format/shard_plan.h"
#include "strata/format/weight_map_json.h"

namespace strata::format {
namespace fs = std::filesystem;

namespace {

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
    add_file(path);
  } else if (!is_there(path)) {
    throw FormatError(fmt::format("there is no checkpoint: no such file or folder: path={}", path));
  } else if (is_there(single)) {
    add_file(single);
  } else if (is_there(index)) {
    open_indexed(index);
  } else {
    throw FormatError(
        fmt::format("a folder holds no checkpoint; wanted {} or {} in it (weights of another "
                    "format are not read; save "
                    "them as safetensors first): path={}",
                    kSingleFileName, kIndexFileName, path));
  }
  sort_names();
}

void CheckpointIndex::add_file(const std::string& path) {
  files_.emplace_back(path);
  for (const TensorInfo& info : files_.back().tensors()) {
    tensors_.push_back(CheckpointTensor{files_.size() - 1, info});
  }
}

void CheckpointIndex::open_indexed(const std::string& index_path) {
  const FileOfTensor file_of_tensor = read_weight_map_json(index_path);
  std::map<std::string, std::size_t> number_of_file;
  for (const auto& [tensor, file] : file_of_tensor) number_of_file.emplace(file, 0);
  std::vector<std::string> missing;
  for (const auto& [file, number] : number_of_file) {
    if (!is_there(path_ + "/" + file)) missing.push_back(in_quotes(file));
  }
  if (!missing.empty()) {
    throw FormatError(
        fmt::format("a checkpoint lacks files that its index names; is the download complete?: "
                    "path={} missing={} "
                    "files={}",
                    index_path, missing.size(), first_ten(missing)));
  }
  for (auto& [file, number] : number_of_file) {
    number = files_.size();
    add_file(path_ + "/" + file);
  }
  sort_names();  // refuses a tensor in two files, before those not named by the index are dropped
  std::vector<std::string> absent;
  for (const auto& [tensor, file] : file_of_tensor) {
    const CheckpointTensor* found = find(tensor);
    if (found == nullptr || found->file != number_of_file.at(file)) {
      absent.push_back(fmt::format("{} in {}", in_quotes(tensor), in_quotes(file)));
    }
  }
  if (!absent.empty()) {
    throw FormatError(
        fmt::format("files of a checkpoint lack tensors that its index says they hold: path={} "
                    "missing={} tensors={}",
                    index_path, absent.size(), first_ten(absent)));
  }
  std::erase_if(tensors_, [&](const CheckpointTensor& tensor) {
    return file_of_tensor.find(tensor.info.name) == file_of_tensor.end();
  });
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
