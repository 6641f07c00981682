// What this rank contributes to a checkpoint: the plan of its files. The rank whose shards count
// writes; where several shard groups hold the same, those of the first do. Tensors beside the
// parameters, buffers and what the script gave, are written by one rank each.
//
// Threads: the engine's. Ownership: borrows what the request refers to. Errors: UsageError for
// states that no parameter has.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "strata/engine/checkpoint/shard_file.h"
#include "strata/engine/engine.h"
#include "strata/format/manifest.h"

namespace strata::engine {

// A tensor beside the parameters, whole, in memory of the host or the device.
struct ExtraTensor {
  format::ManifestTensor tensor;     // any role but kParameter
  std::span<const std::byte> bytes;  // on other ranks nobody looks at them
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

struct SavedShards {
  std::vector<format::ManifestTensor> tensors;  // of the checkpoint, alike on all ranks
  std::vector<std::string> kinds;               // alike on all ranks
  std::vector<ShardFile> files;                 // of this rank
};

// `kinds_of_all`: every kind that some rank has; gathered by the caller.
SavedShards plan_saved_shards(Engine& engine, const ShardStates& states,
                              const SavedContent& content,
                              std::span<const std::string> kinds_of_all);

// The kinds that this rank saves: those of the engine's optimizer and of the content's states.
std::vector<std::string> kinds_of(Engine& engine, const ShardStates& states,
                                  const SavedContent& content);

}  // namespace strata::engine
