// Takes the values of a live model's parameters into the engine's shards.
#pragma once

#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/sharded_model.h"

namespace strata::torch {

// Collective. Rank 0's values win: ranks compare fingerprints of pieces, and those that differ
// anywhere are sent from rank 0. Values may lie on the host or on the engine's device, `place`,
// contiguous or not. Each parameter's own memory is let go as soon as its shard is
// filled, so the peak is the model as the user built it plus this rank's shards. Parameters without
// values are skipped. Throws ConfigError when ranks bring different dtypes or different sets of
// values.
void adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters);

}  // namespace strata::torch
