// The two sides of `strata diff`: checkpoints as named tensors, and how far the elements of two
// tensors are apart. Values; a meter is of one thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/checkpoint/folder.h"
#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/manifest.h"
#include "strata/format/safetensors.h"
#include "strata/io/thread_engine.h"
#include "strata/plan/param_spec.h"

namespace strata::cli {

// A tensor, or what an optimizer keeps of one.
struct SourceTensor : format::ManifestTensor {
  std::string kind;  // "value"; of a training checkpoint also "exp_avg", ..., "client", "of a rank"
  Numel numel;
  std::vector<format::ManifestRange> runs;  // by begin; they cover the tensor
};

// Checkpoints of either kind that a path means, as named tensors and where their elements lie: a
// training checkpoint (a folder with a manifest, or a folder of such folders, in which the file
// `latest` names one; each tensor is runs of elements in the files of several ranks), or
// safetensors, one file or a Hugging Face folder (each tensor is one run).
//
// Threads: values, immutable after construction; safe everywhere. Ownership: a TensorSource holds
// the open files. Errors: UsageError for a path that is no folder; FormatError for a folder that
// holds no checkpoint; those of format::CheckpointIndex.
class TensorSource {
 public:
  // `kinds`: also what optimizers keep, tensors of the script's and buffers of single ranks, of a
  // training checkpoint.
  TensorSource(const std::string& path, bool kinds) : path_(path) {
    std::error_code error;
    if (!std::filesystem::exists(path, error))
      throw UsageError(
          "there is no such file or folder; give a training checkpoint's folder, a Hugging Face "
          "folder or a .safetensors file: path={}",
          path);
    is_training_ = checkpoint::holds_checkpoints(path);
    add_tensors(is_training_ ? open_training() : open_safetensors(), kinds);
  }

  const std::string& path() const { return path_; }
  bool is_training() const { return is_training_; }
  const std::vector<SourceTensor>& tensors() const { return tensors_; }  // by name, as people count
  // Null if there is none of that name, nor one with that alias.
  const SourceTensor* find(const std::string& name, const std::string& kind) const {
    const auto found = places_.find({name, kind});
    return found == places_.end() ? nullptr : &tensors_[found->second];
  }
  const io::File& file(std::size_t index) const {
    return index_ ? index_->files()[index].file() : files_[index];
  }

 private:
  format::Manifest open_training() {
    path_ = checkpoint::choose_checkpoint(path_).path;
    format::Manifest manifest = format::read_manifest(path_);
    for (const format::ManifestFile& file : manifest.files)
      files_.push_back(checkpoint::open_file(path_, file));
    return manifest;
  }
  // As a manifest would say it.
  format::Manifest open_safetensors() {
    format::Manifest manifest;
    manifest.kinds.emplace_back(format::kValue);
    index_.emplace(path_);
    for (const auto& [file, info] : index_->tensors()) {
      if (info.numel.value > 0)
        manifest.extents.push_back(
            {manifest.tensors.size(), 0, info.dtype, file, info.offset, Numel(), info.numel});
      manifest.tensors.push_back(
          {info.name, format::TensorRole::kParameter, info.shape, info.dtype, false, {}});
    }
    return manifest;
  }
  void add_tensors(const format::Manifest& manifest, bool kinds) {
    std::map<std::pair<std::size_t, std::size_t>, SourceTensor> found;  // by tensor and kind
    const auto find = [&](std::size_t t, std::size_t k) -> SourceTensor* {
      const format::ManifestTensor& tensor = manifest.tensors[t];
      const bool client = tensor.role == format::TensorRole::kClient;
      const bool of_rank = tensor.role == format::TensorRole::kRankBuffer;
      if ((client || of_rank || k != 0) && !kinds) return nullptr;
      const std::string kind = client ? "client" : of_rank ? "of a rank" : manifest.kinds[k];
      const Numel numel = format::numel_of(kind, *format::checked_numel(tensor.shape));
      const auto [place, is_new] = found.try_emplace({t, k}, SourceTensor{tensor, kind, numel, {}});
      if (is_new && format::elements_each(kind) > 1) place->second.shape = {numel.value};
      return &place->second;
    };
    for (std::size_t t = 0; t < manifest.tensors.size(); ++t) find(t, 0);
    for (const format::ManifestRange& extent : manifest.extents) {
      SourceTensor* const tensor = find(extent.tensor, extent.kind);
      if (tensor == nullptr) continue;
      tensor->runs.push_back(extent);
      if (extent.kind != 0) tensor->dtype = extent.dtype;
    }
    for (auto& [place, tensor] : found) {
      std::ranges::sort(tensor.runs, {}, &format::ManifestRange::begin);
      if (tensor.channels_last && format::elements_each(tensor.kind) == 1) reorder(tensor);
      tensors_.push_back(std::move(tensor));
    }
    std::ranges::sort(tensors_, [](const SourceTensor& a, const SourceTensor& b) {
      return a.name != b.name ? NaturalLess()(a.name, b.name) : a.kind < b.kind;
    });
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      places_.emplace(std::pair(tensors_[i].name, tensors_[i].kind), i);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      for (const std::string& alias : tensors_[i].aliases)
        places_.emplace(std::pair(alias, tensors_[i].kind), i);
    }
  }
  // Neighbours in the order of the dimensions are far apart in the file: the tensor gets another
  // one, in memory.
  void reorder(SourceTensor& tensor) {
    if (tensor.runs.empty()) return;
    const DType dtype = tensor.runs.front().dtype;
    io::ThreadEngine io;
    std::vector<std::byte> bytes(bytes_of(tensor.numel, dtype).size());
    for (const format::ManifestRange& run : tensor.runs)
      io.read(files_[run.file], run.offset,
              std::span(bytes).subspan(bytes_of(run.begin, dtype).size(),
                                       bytes_of(run.end - run.begin, dtype).size()))
          ->wait();
    plan::reorder(bytes, tensor.shape, size_of(dtype), /*channels_last=*/false);
    files_.push_back(io::File::in_memory(bytes));
    tensor.runs = {{0, 0, dtype, files_.size() - 1, Bytes(), Numel(), tensor.numel}};
  }

  std::string path_;
  bool is_training_ = false;
  std::vector<io::File> files_;
  std::optional<format::CheckpointIndex> index_;  // of safetensors
  std::vector<SourceTensor> tensors_;
  std::map<std::pair<std::string, std::string>, std::size_t> places_;  // by name and kind
};

// How far the elements of two tensors are apart. A NaN equals a NaN, and is infinitely far from a
// number. Numbers are compared as numbers: floating ones in fp64, which holds each of them exactly;
// integers by themselves. Elements of other types (float8) are compared by their bytes alone.
struct ElementDifference {
  Numel differing;
  double largest = 0;  // infinite: NaN against a number
  Numel at;            // the first element that differs that much
  double a = 0;
  double b = 0;
  bool has_values = true;  // false: float8; `largest`, `a` and `b` say nothing
};

// Whether elements of these dtypes can be compared: two floating ones, two integers, or the same.
bool comparable(DType a, DType b);

// Holds two pieces in fp64.
class DifferenceMeter {
 public:
  // `rounded_to`: floating values are rounded to it before they are compared.
  void add(std::span<const std::byte> a, DType a_dtype, std::span<const std::byte> b, DType b_dtype,
           std::optional<DType> rounded_to, Numel first, ElementDifference& difference);

 private:
  std::vector<std::byte> rounded_;
  std::vector<double> a_;
  std::vector<double> b_;
};

}  // namespace strata::cli
