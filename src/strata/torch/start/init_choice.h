// What plan::choose_init is asked for a torch model: where its values lie, and what every rank has
// room for.
#pragma once

#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/model_runtime.h"

namespace strata::torch {

// Collective, the same answer on every rank; moves nothing, but gives back what torch's allocator
// holds unused. Errors: plan/init_plan.h; on every rank.
plan::InitChoice choose_init(const ModelInput& input, const PlannedModel& model,
                             const engine::Config& config, engine::UpdateRule rule,
                             const ModelRuntime& runtime);

}  // namespace strata::torch
