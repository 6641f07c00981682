// The memory that the ranks of a job have for a model. Automatic placement must be the same on
// every rank, so the rank with the least memory decides. If a host lacks the staging memory, the
// start is refused before it takes any. Threads: one. Errors: CommError, ConfigError for ranks of
// different configurations; OutOfMemoryError.
#pragma once

#include "strata/engine/config/config.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/forecast/auto_placement.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/model/model_runtime.h"

namespace strata::torch {

// Collective if the configuration's placement is automatic; else the result has no bounds. Memory
// of the model's values on the device counts as free, because the engine takes them over.
forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime);

// Throws OutOfMemoryError if the ranks of a host together need more than `available` bytes of
// staging memory for drive-resident states or weights.
void require_staging_room(const engine::EngineOptions& options, int ranks_of_host, Bytes available);

}  // namespace strata::torch
