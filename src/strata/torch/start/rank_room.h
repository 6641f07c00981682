// What memory the ranks of a job have for a model. Placement that the engine chooses has to be the
// same on every rank, so the rank with the least counts. Staging memory that a host does not have
// is refused before anything is taken. Threads: one. Errors: CommError, ConfigError for ranks of
// different configurations; OutOfMemoryError.
#pragma once

#include "strata/engine/config/config.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/forecast/auto_placement.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/model/model_runtime.h"

namespace strata::torch {

// Collective where the configuration's placement is automatic; else no bounds. Values of the model
// that lie on the device count as free: the engine takes them over.
forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime);

// Throws OutOfMemoryError where the ranks of a host together would stage what lies on drives
// through more memory than is available there: `available`.
void require_staging_room(const engine::EngineOptions& options, int ranks_of_host, Bytes available);

}  // namespace strata::torch
