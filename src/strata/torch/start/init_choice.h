// Calls plan::choose_init for a torch model, with the places of its values and the free memory of
// every rank.
#pragma once

#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/model_runtime.h"

namespace strata::torch {

// Collective; returns the same choice on every rank. Moves nothing, but returns unused memory of
// torch's allocator to the system. Errors: plan/init_plan.h; on every rank.
plan::InitChoice choose_init(const ModelInput& input, const PlannedModel& model,
                             const engine::Config& config, engine::UpdateRule rule,
                             const ModelRuntime& runtime);

}  // namespace strata::torch
