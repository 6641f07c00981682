// Takes the values of a live model's parameters into the engine's shards.
#pragma once

#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"
#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/start/original_values.h"

namespace strata::torch {

// By parameter, in what dtype its values come, if it has some: what ranks have in common, or they
// bring different models. For engine::require_same_text, before adopt_values().
std::string describe_values(const std::vector<ModelParameter>& parameters);

// Collective. Rank 0's values win: ranks read them where rank 0 has them (rank_0_values.h), or
// compare fingerprints of blocks, and those that differ anywhere are sent from rank 0. Values may
// lie on the host or on the engine's device, `place`, contiguous or not. `tier` says in which order
// memory is taken and given back (plan/init_plan.h): where the engine's memory does not fit beside
// the values, `originals` are given up as it grows; else all are kept, for the caller to release or
// to put back. Parameters without values are skipped. What other models have sharded comes in
// pieces of `piece`, and they retire. Whether units that stay whole have been written whole, on
// every rank.
bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier,
                  ThreadPool& threads, OriginalValues& originals, Bytes piece);

}  // namespace strata::torch
