// Values that are made where they are kept: recipes (kernels/recipe.h) are replayed piece by piece,
// each rank what its shards hold, so that no parameter is ever whole anywhere. Two pieces of host
// memory are all that this takes: one is filled while the device has the other.
// Threads: the engine's, and those of the pool. Errors, on every rank: OutOfMemoryError for the
// pieces or as the engine's memory grows; what the stores of offloaded weights throw; CommError.
#pragma once

#include <span>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"
#include "strata/kernels/recipe.h"

namespace strata::engine {

struct ParamRecipe {
  int param = 0;
  kernels::Recipe recipe;
  DType dtype = DType::kFloat32;  // of the values, before they become weights
};

// Collective. Follow with Engine::weights_changed(). `piece`: of values, of one element at least.
void replay_weights(Engine& engine, std::span<const ParamRecipe> recipes, Bytes piece,
                    ThreadPool& threads);

}  // namespace strata::engine
