// Lends the values of a sharded parameter to another model that takes it over: piece by piece, so
// that the parameter is whole nowhere. Free functions over an engine. Threads: the engine's.
// Errors: CommError; those of the stores of offloaded weights.
#pragma once

#include "strata/engine/engine.h"
#include "strata/torch/model/model_input.h"

namespace strata::torch {

// Whether pieces can be lent. Ranks of shard groups cannot lend: they hold more than their own
// part, and gather.
bool lends_pieces(engine::Engine& engine);

// Collective, unless only own parts are lent.
void lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing);

}  // namespace strata::torch
