// Loads weights from a checkpoint: each rank reads the ranges of the files that its own shards
// hold, in the order of the files, and casts them where the dtypes differ. Not a collective: wrap
// it in together(), and call Engine::weights_changed() when every rank is done. Threads: the
// engine's. Memory: a StagingRing, whatever the model's size, and a few words a range. Errors:
// IoError (the shards hold a mixture then: load again or give the engine up), UsageError for a map
// of other parameters.
#pragma once

#include <span>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/engine/staging_ring.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/weight_map.h"
#include "strata/io/io_engine.h"

namespace strata::engine {

// One read of a file, and the copies that it serves: pieces [first_piece, first_piece +
// piece_count).
struct ReadBatch {
  std::size_t file = 0;
  Bytes offset;
  Bytes bytes;
  std::size_t first_piece = 0;
  std::size_t piece_count = 0;
};

struct ReadPlan {
  std::vector<format::RangeCopy> pieces;  // none larger than a buffer
  std::vector<ReadBatch> batches;
};

// Cuts what is larger than a buffer, and reads neighbours together. `copies` by file and offset.
// Every piece lies in its buffer at a multiple of its element's size. Pure.
ReadPlan plan_reads(std::span<const format::RangeCopy> copies, Bytes buffer_bytes);

struct LoadedBytes {
  Bytes read;  // of the files
};

// `params`: by the map's parameters, their indices in the engine. Told to the engine's init report
// as phase "read".
LoadedBytes load_weights(Engine& engine, const format::CheckpointIndex& checkpoint,
                         const format::WeightMap& map, std::span<const int> params,
                         io::IoEngine& io, const StagingOptions& staging = {});

}  // namespace strata::engine
