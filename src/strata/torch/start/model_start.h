// The start of a model under the engine: ranks compare what they bring, the way that the values
// take is chosen, the engine is made, and it takes the values of every parameter that has some
// (rank 0's count: others receive what differs).
//
// A start that fails leaves the parameters their values, unless their memory had to be given up for
// the engine's: the error says so. Threads: the caller's, and those that read values on the host.
// Ownership: the result is the caller's; borrows the rest. Errors: ConfigError, CommError,
// OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/model_runtime.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/training_passes.h"

namespace strata::torch {

struct StartOptions {
  engine::UpdateRule rule;
  std::string name;                       // tells the engines of one process apart in shared memory
  engine::InitReport::Progress progress;  // may be empty
};

struct StartedModel {
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<TrainingPasses> passes;  // of the engine, and gone before it
  // What the parameters had on the host and nobody else has (OriginalValues::release()).
  std::vector<at::Tensor> replaced;
};

// Collective. `parameters` are those of the input, not bound yet.
StartedModel start_model(const ModelInput& input, const PlannedModel& model,
                         const engine::Config& config, const ModelRuntime& runtime,
                         ParameterSet& parameters, StartOptions options);

}  // namespace strata::torch
