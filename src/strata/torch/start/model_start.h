// Starts a model under the engine: ranks compare their models, choose how the values travel, make
// the engine, and move the values of every parameter that has some into it (rank 0's values win:
// other ranks receive the differences).
//
// If a start fails, the parameters keep their values, unless their memory had to be given up for
// the engine's; then the error says so. Threads: the caller's, and those that read values on the
// host.
// Ownership: the result is the caller's; borrows the rest. Errors: ConfigError, CommError,
// OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/training_passes.h"

namespace strata::torch {

struct StartOptions {
  engine::UpdateRule rule;
  std::string name;                       // distinguishes a process's engines in shared memory
  engine::InitReport::Progress progress;  // may be empty
};

struct StartedModel {
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<TrainingPasses> passes;  // of the engine, and gone before it
  // Former values of parameters on the host that no other owner shares (OriginalValues::release()).
  std::vector<at::Tensor> replaced;
};

// Collective. `parameters` are those of the input, not bound yet.
StartedModel start_model(const ModelInput& input, const PlannedModel& model,
                         const engine::Config& config, const ModelRuntime& runtime,
                         ParameterSet& parameters, StartOptions options);

// Loads the libraries and kernels that torch would load when a model first computes: those of a
// transformer's forward and backward pass. On a GPU loading takes most of the first step, so it
// runs beside a start, which leaves the GPU idle. Threads: any, without Python's lock; work goes to
// the place's default stream. Memory: some megabytes of torch's cache, and memory that its
// libraries keep for themselves. Errors: torch's own; the first step would fail with them, too.
// Runs one pass of a tiny block in this floating dtype, and returns when it is over. Draws no
// random numbers.
void warm_up(c10::Device place, c10::ScalarType dtype);

}  // namespace strata::torch
