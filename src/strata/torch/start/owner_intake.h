// Moves parameters that other models have sharded already (zero.Init) into the engine that takes
// them over. If both cut a parameter alike, its values stay on their ranks. If it has at most 32
// pieces and training does not use it in tiles, it is gathered. Otherwise it moves piece by piece.
// Threads: the engine's. Errors: those of the owners and of ValueIntake.
#pragma once

#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/start/value_intake.h"

namespace strata::torch {

// Collective. The owners retire. `piece`: the bytes that owners lend at once.
void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece);

}  // namespace strata::torch
