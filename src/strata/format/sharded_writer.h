// Writes a model's tensors as a Hugging Face checkpoint folder: one model.safetensors, or shards of
// a largest size with model.safetensors.index.json. Byte ranges of tensors come in any order. Until
// finish() the folder's earlier checkpoint does not change. finish() first has every new file whole
// on disk under a temporary name; then an index whose shards are about to be overwritten goes, so
// that a crash within the renaming leaves a folder that says what it lacks and never a mix of two
// checkpoints; then come the names, the new index, and last the removal of what an earlier save
// left, in this form or in torch.save's. Threads, ownership, errors: as SafetensorsWriter. One file
// descriptor is held for each shard.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/format/safetensors_writer.h"
#include "strata/format/shard_plan.h"

namespace strata::format {

struct ShardedWriterOptions {
  Bytes shard_max = 5'000'000'000_B;
  // transformers refuses files that do not say which framework's they are.
  Metadata metadata = {{"format", "pt"}};
};

class ShardedWriter {
 public:
  // Makes the folder if need be, takes the space of every shard and writes the headers.
  ShardedWriter(std::string folder, std::vector<TensorSpec> tensors, io::IoEngine& engine,
                const ShardedWriterOptions& options = {});

  const ShardPlan& plan() const { return plan_; }
  std::unique_ptr<io::Transfer> write(std::size_t tensor, Bytes offset,
                                      std::span<const std::byte> source);
  void finish();

 private:
  struct Place {
    std::size_t file = 0;
    std::size_t index = 0;  // within the file
  };
  std::string in_folder(const std::string& name) const { return folder_ + "/" + name; }
  void retire_index_of_overwritten_shards() const;
  void publish_index() const;
  void remove_leftovers() const;

  std::string folder_;
  std::vector<TensorSpec> tensors_;
  ShardPlan plan_;
  std::vector<Place> places_;  // by tensor
  std::vector<SafetensorsWriter> writers_;
};

}  // namespace strata::format
