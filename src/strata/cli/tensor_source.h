// Checkpoints of either kind that a path means, as named tensors and where their elements lie: a
// training checkpoint (a folder with a manifest, or a folder of such folders, in which the file
// `latest` names one; each tensor is runs of elements in the files of several ranks), or
// safetensors, one file or a Hugging Face folder (each tensor is one run).
//
// Threads: values, immutable after construction; safe everywhere. Ownership: a TensorSource holds
// the open files. Errors: UsageError for a path that is no folder; FormatError for a folder that
// holds no checkpoint; those of format::CheckpointIndex.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/format/checkpoint_index.h"
#include "strata/format/manifest.h"

namespace strata::cli {

// Elements [begin, end) of a tensor, as `dtype` at `offset` of a file.
struct ElementRange {
  std::size_t file = 0;
  Bytes offset;
  DType dtype = DType::kFloat32;
  Numel begin;
  Numel end;
};

struct SourceTensor {
  std::string name;
  std::string kind;  // "value"; of a training checkpoint also "exp_avg", ..., "client", "of a rank"
  std::vector<std::int64_t> shape;
  Numel numel;
  DType dtype = DType::kFloat32;  // a value's: in which the model computes
  std::vector<std::string> aliases;
  std::vector<ElementRange> runs;  // by begin; they cover the tensor
};

class TensorSource {
 public:
  // `kinds`: also what optimizers keep, tensors of the script's and buffers of single ranks, of a
  // training checkpoint.
  TensorSource(const std::string& path, bool kinds);

  const std::string& path() const { return path_; }
  bool is_training() const { return is_training_; }
  const std::vector<SourceTensor>& tensors() const { return tensors_; }  // by name, as people count
  // Null if there is none of that name, nor one with that alias.
  const SourceTensor* find(const std::string& name, const std::string& kind) const;
  const io::File& file(std::size_t index) const { return *open_[index]; }

 private:
  void open_training(const std::string& path, bool kinds);
  void reorder(SourceTensor& tensor);
  void open_safetensors(const std::string& path);
  void sort();

  std::string path_;
  bool is_training_ = false;
  std::vector<io::File> files_;
  std::optional<format::CheckpointIndex> index_;
  std::vector<const io::File*> open_;
  std::vector<SourceTensor> tensors_;
  std::map<std::pair<std::string, std::string>, std::size_t> places_;  // by name and kind
};

}  // namespace strata::cli
