// How a model that has sharded a parameter lends its values to the one that takes it over: piece by
// piece, so that it is whole nowhere. Free functions over an engine. Threads: the engine's. Errors:
// CommError; those of the stores of offloaded weights.
#pragma once

#include "strata/engine/engine.h"
#include "strata/torch/model/model_input.h"

namespace strata::torch {

// Whether pieces can be lent: ranks of shard groups hold more than what is theirs, and gather.
bool lends_pieces(engine::Engine& engine);

// Collective, unless only own parts are lent.
void lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing);

}  // namespace strata::torch
