// This rank's part of a checkpoint: the plan of its files, and their bytes. The rank
// whose shards count writes; where several shard groups hold the same, those of the first do.
// Tensors beside the parameters, buffers and what the script gave, are written by one rank each.
//
// Threads: the engine's. Ownership: borrows what the request refers to. Errors: UsageError for
// states that no parameter has.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "strata/checkpoint/writer.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/engine/engine.h"
#include "strata/format/manifest.h"

namespace strata::engine {

// A tensor beside the parameters, whole, in memory of the host or the device.
struct ExtraTensor {
  format::ManifestTensor tensor;     // any role but kParameter
  std::span<const std::byte> bytes;  // on other ranks they do not count
  int rank = 0;                      // that writes it
};

// A state of an optimizer of the user's: one element for each of this rank's part of a parameter.
struct ExtraState {
  int param = 0;
  std::string kind;
  DType dtype = DType::kFloat32;
  const std::byte* memory = nullptr;  // of the first element that this rank owns
};

struct SavedContent {
  std::vector<std::vector<std::string>> aliases;  // by parameter; empty: there are none
  std::vector<ExtraTensor> tensors;
  std::vector<ExtraState> states;
  bool frozen = true;  // false: frozen parameters are left out
};

// Elements of a unit's shard, of a kind.
struct ShardOffset {
  int unit = 0;
  Numel first;
};
using ShardSource =
    std::variant<ShardOffset, const std::byte*>;  // memory: of the host or the device

// A file, and where its parts come from.
struct ShardFile {
  checkpoint::FileLayout layout;
  std::vector<ShardSource> sources;
};

struct SavedShards {
  std::vector<format::ManifestTensor> tensors;  // of the checkpoint, alike on all ranks
  std::vector<std::string> kinds;               // alike on all ranks
  std::vector<ShardFile> files;                 // of this rank

  std::vector<const checkpoint::FileLayout*> layouts() const;
};

// Fills buffers on the compute stream. Borrows all.
class ShardFileSource final : public checkpoint::WholeFile {
 public:
  ShardFileSource(const ShardFile& file, ShardStates& states, device::Device& device, Bytes piece)
      : WholeFile(file.layout.bytes(), piece), file_(file), states_(states), device_(device) {}
  device::Stream* stream() override { return &device_.compute_stream(); }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override;

 private:
  const ShardFile& file_;
  ShardStates& states_;
  device::Device& device_;
};

// `kinds_of_all`: every kind that some rank has; gathered by the caller.
SavedShards plan_saved_shards(Engine& engine, const ShardStates& states,
                              const SavedContent& content,
                              std::span<const std::string> kinds_of_all);

// Collective: the same, with the kinds of all ranks, in one order.
SavedShards plan_together(Engine& engine, const ShardStates& states, const SavedContent& content);

// The kinds that this rank saves: those of the engine's optimizer and of the content's states.
std::vector<std::string> kinds_of(Engine& engine, const ShardStates& states,
                                  const SavedContent& content);

}  // namespace strata::engine
