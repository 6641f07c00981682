// This rank's part of a checkpoint: the plan of its files, and their bytes. Where several shard
// groups hold the same, ranks of the first write. One rank each writes the tensors beside the
// parameters: buffers, and what the script gave.
//
// Threads: the engine's. Ownership: borrows what the request refers to. Errors: UsageError for
// states that no parameter has.
#pragma once

#include <cstddef>
#include <span>
#include <string>
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

// A state of an optimizer of the user's: one element for each of this rank's part of a parameter,
// or of the whole parameter that this rank owns.
struct ExtraState {
  int param = 0;
  std::string kind;
  DType dtype = DType::kFloat32;
  const std::byte* memory = nullptr;  // of the first element that this rank has
  Numel numel{};                      // that this rank has
};

struct SavedContent {
  std::vector<std::vector<std::string>> aliases;  // by parameter; empty: there are none
  std::vector<ExtraTensor> tensors;
  std::vector<ExtraState> states;
  bool frozen = true;  // false: frozen parameters are left out
};

struct SavedShards {
  format::Manifest manifest;                  // its tensors and kinds, alike on all ranks
  std::vector<checkpoint::FileLayout> files;  // of this rank

  // The bytes of a copy of the files, each of which begins at a block of direct transfers.
  Bytes copied() const;
};

// Fills buffers with a file on the compute stream. Borrows all.
checkpoint::WholeFile shard_file(const checkpoint::FileLayout& file, ShardStates& states,
                                 device::Device& device, Bytes piece);

// `kinds_of_all`: every kind that some rank has; gathered by the caller.
SavedShards plan_saved_shards(Engine& engine, const ShardStates& states,
                              const SavedContent& content,
                              std::span<const std::string> kinds_of_all);

// Collective: the same, with the kinds of all ranks, in one order.
SavedShards plan_together(Engine& engine, const ShardStates& states, const SavedContent& content);

// The kinds that this rank saves: those of the engine's optimizer and of the content.
std::vector<std::string> kinds_of(Engine& engine, const ShardStates& states,
                                  const SavedContent& content);

}  // namespace strata::engine
