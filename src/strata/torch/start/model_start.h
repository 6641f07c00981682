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

#include "strata/torch/model/training_passes.h"

namespace strata::torch {

// The memory that the ranks of a job have for a model. Automatic placement must be the same on
// every rank, so the rank with the least memory decides. Collective if the configuration's
// placement is automatic; else the result has no bounds. Memory of the model's values on the device
// counts as free, because the engine takes them over.
forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime);

struct StartOptions {
  engine::UpdateRule rule;
  std::string name;                       // distinguishes a process's engines in shared memory
  engine::InitReport::Progress progress;  // may be empty
};

struct StartedModel {
  std::unique_ptr<engine::Engine> engine;
  std::shared_ptr<void> on_growth;         // calls the engine, and is gone before it
  std::unique_ptr<TrainingPasses> passes;  // of the engine, and gone before it
  // Former values of parameters on the host that no other owner shares (OriginalValues::release()).
  std::vector<at::Tensor> replaced;
};

// Collective. `parameters` are those of the input, not bound yet.
StartedModel start_model(const ModelInput& input, const PlannedModel& model,
                         const engine::Config& config, const ModelRuntime& runtime,
                         ParameterSet& parameters, StartOptions options);

}  // namespace strata::torch
