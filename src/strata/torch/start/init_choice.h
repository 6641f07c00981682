// Decisions of the start that depend on the memory of all ranks: where states lie, and how a
// model's values reach the engine. Ranks decide together. Threads: one. Errors: CommError,
// ConfigError for ranks of different configurations, OutOfMemoryError.
#pragma once

#include "strata/engine/config/config.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/forecast/auto_placement.h"
#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

// Calls plan::choose_init for a torch model, with the places of its values and the free memory of
// every rank. Collective; returns the same choice on every rank. Moves nothing, but returns unused
// memory of torch's allocator to the system. Errors: plan/init_plan.h; on every rank.
plan::InitChoice choose_init(const ModelInput& input, const PlannedModel& model,
                             const engine::Config& config, engine::UpdateRule rule,
                             const ModelRuntime& runtime);

// The memory that the ranks of a job have for a model. Automatic placement must be the same on
// every rank, so the rank with the least memory decides. Collective if the configuration's
// placement is automatic; else the result has no bounds. Memory of the model's values on the device
// counts as free, because the engine takes them over.
forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime);

// Throws OutOfMemoryError if the ranks of a host together need more than `available` bytes of
// staging memory, before any is taken, for drive-resident states or weights.
void require_staging_room(const engine::EngineOptions& options, int ranks_of_host, Bytes available);

}  // namespace strata::torch
