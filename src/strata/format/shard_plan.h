// How a model's tensors are spread over files of a checkpoint folder: in their order, a new file
// whenever the next tensor would make the present one larger than allowed; a tensor larger than
// that has a file of its own. Names are those that Hugging Face readers look for. Pure; safe
// everywhere.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/tensor_info.h"

namespace strata::format {

inline constexpr const char* kSingleFileName = "model.safetensors";
inline constexpr const char* kIndexFileName = "model.safetensors.index.json";

struct ShardPlan {
  std::vector<std::string> files;  // one: model.safetensors, or model-00001-of-0000N...
  std::vector<std::vector<std::size_t>> tensors;  // by file: indices into the list planned for
  Bytes total;                                    // of data

  bool sharded() const { return files.size() > 1; }
};

// UsageError if the limit is not positive or a tensor's size overflows.
ShardPlan plan_shards(std::span<const TensorSpec> tensors, Bytes shard_max);

// Is it a name of one of any number of shards, of safetensors or of torch.save?
bool is_shard_name(std::string_view file_name);

}  // namespace strata::format
