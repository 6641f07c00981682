// Takes the values of a live model's parameters into the engine's shards.
#pragma once

#include <vector>

#include "strata/engine/engine.h"
#include "strata/plan/init_plan.h"
#include "strata/torch/sharded_model.h"

namespace strata::torch {

// Collective. Rank 0's values win: ranks compare fingerprints of pieces, and those that differ
// anywhere are sent from rank 0. Values may lie on the host or on the engine's device, `place`,
// contiguous or not. `tier` says in which order memory is taken and given back (plan/init_plan.h);
// in all of them the parameters are without memory of their own afterwards. Parameters without
// values are skipped. Whether units that stay whole have been written whole, on every rank. Throws
// ConfigError when ranks bring different dtypes or different sets of values; nothing was moved
// then.
bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier);

}  // namespace strata::torch
