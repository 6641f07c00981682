#include "strata/cli/tensor_source.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "strata/base/error.h"
#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/format/checkpoint_folder.h"
#include "strata/format/message_text.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

std::string listed(const std::vector<std::string>& tags) {
  return tags.empty() ? "none" : format::first_ten(tags);
}

constexpr const char* kClientKind = "client";
constexpr const char* kRankBufferKind = "of a rank";

bool is_of_model(format::TensorRole role) {
  return role == format::TensorRole::kParameter || role == format::TensorRole::kBuffer;
}

std::string kind_of(const format::Manifest& manifest, std::size_t tensor, std::size_t kind) {
  switch (manifest.tensors[tensor].role) {
    case format::TensorRole::kClient:
      return kClientKind;
    case format::TensorRole::kRankBuffer:
      return kRankBufferKind;
    default:
      return manifest.kinds[kind];
  }
}

}  // namespace

bool has_manifest(const std::string& folder) {
  return is_there(folder + "/" + std::string(format::kManifestName));
}

bool holds_checkpoints(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  return has_manifest(path) || format::latest_tag(path) || !format::whole_checkpoints(path).empty();
}

ChosenCheckpoint choose_checkpoint(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    throw UsageError(
        fmt::format("there is no such folder; give that of a training checkpoint: path={} ({})",
                    path, fs::exists(path, error) ? "is a file" : "is not there"));
  }
  if (has_manifest(path)) return {path, {}, ""};
  ChosenCheckpoint chosen;
  chosen.tags = format::whole_checkpoints(path);
  chosen.latest = format::latest_tag(path).value_or("");
  if (chosen.latest.empty()) {
    throw FormatError(fmt::format(
        "a folder is no training checkpoint of Strata: there is neither {} nor 'latest' in it (a "
        "save that did not end has neither); checkpoints in it: {}: path={}",
        format::kManifestName, listed(chosen.tags), path));
  }
  const auto found = format::find_checkpoint(path, chosen.latest);
  if (!found) {
    throw FormatError(fmt::format(
        "'latest' names {}, which holds no {}: it was not saved by Strata, or is gone; whole "
        "checkpoints beside it: {}: path={}",
        format::in_quotes(chosen.latest), format::kManifestName, listed(chosen.tags), path));
  }
  chosen.path = *found;
  return chosen;
}

TensorSource::TensorSource(const std::string& path, bool kinds) : path_(path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    throw UsageError(
        fmt::format("there is no such file or folder; give a training checkpoint's folder, a "
                    "Hugging Face folder or a .safetensors file: path={}",
                    path));
  }
  if (holds_checkpoints(path)) {
    open_training(path, kinds);
  } else {
    open_safetensors(path);
  }
  sort();
}

void TensorSource::open_training(const std::string& path, bool kinds) {
  is_training_ = true;
  path_ = choose_checkpoint(path).path;
  const format::Manifest manifest = format::read_manifest(path_);
  for (const format::ManifestFile& file : manifest.files)
    files_.push_back(checkpoint::open_file(path_, file));
  for (const io::File& file : files_) open_.push_back(&file);
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> place;  // of tensor and kind
  const auto add = [&](std::size_t t, std::size_t k) {
    const format::ManifestTensor& tensor = manifest.tensors[t];
    if ((!is_of_model(tensor.role) || k != 0) && !kinds) return;
    if (!place.emplace(std::pair(t, k), tensors_.size()).second) return;
    tensors_.push_back({tensor.name,
                        kind_of(manifest, t, k),
                        tensor.shape,
                        *format::checked_numel(tensor.shape),
                        tensor.dtype,
                        tensor.aliases,
                        {}});
  };
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) add(t, 0);
  for (const format::ManifestRange& extent : manifest.extents) {
    add(extent.tensor, extent.kind);
    const auto found = place.find({extent.tensor, extent.kind});
    if (found == place.end()) continue;
    SourceTensor& tensor = tensors_[found->second];
    tensor.runs.push_back({extent.file, extent.offset, extent.dtype, extent.begin, extent.end});
    if (extent.kind != 0) tensor.dtype = extent.dtype;
  }
  for (SourceTensor& tensor : tensors_) std::ranges::sort(tensor.runs, {}, &ElementRange::begin);
}

void TensorSource::open_safetensors(const std::string& path) {
  index_.emplace(path);
  open_ = index_->open_files();
  for (const auto& [file, info] : index_->tensors()) {
    SourceTensor tensor{
        info.name, std::string(format::kValue), info.shape, info.numel, info.dtype, {}, {}};
    if (info.numel.value > 0)
      tensor.runs.push_back({file, info.offset, info.dtype, Numel(), info.numel});
    tensors_.push_back(std::move(tensor));
  }
}

void TensorSource::sort() {
  std::ranges::sort(tensors_, [](const SourceTensor& a, const SourceTensor& b) {
    if (a.name != b.name) return NaturalLess()(a.name, b.name);
    return a.kind < b.kind;
  });
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    places_.emplace(std::pair(tensors_[i].name, tensors_[i].kind), i);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    for (const std::string& alias : tensors_[i].aliases)
      places_.emplace(std::pair(alias, tensors_[i].kind), i);
  }
}

const SourceTensor* TensorSource::find(const std::string& name, const std::string& kind) const {
  const auto found = places_.find({name, kind});
  return found == places_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace strata::cli
