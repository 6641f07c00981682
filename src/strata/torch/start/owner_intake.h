// Values of parameters that other models have sharded already (zero.Init), on their way into the
// engine that takes them over: without leaving a rank where both cut a parameter alike, gathered
// where it has up to 32 pieces and is no parameter that training uses in tiles, else piece by
// piece. Threads: the engine's. Errors: those of the owners, as ValueIntake's.
#pragma once

#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/start/value_intake.h"

namespace strata::torch {

// Collective. The owners retire. `piece`: bytes that are lent at once.
void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece);

}  // namespace strata::torch
