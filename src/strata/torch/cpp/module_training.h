// Training checkpoints for C++ programs: the engine's shards, the module's buffers, and the
// trainer's own state. Files and folders are those of Python's engine.save_checkpoint, so each face
// loads the other's checkpoints. Threads, errors: those of Trainer.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/schedule/schedule.h"
#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

// Parts of a trainer that a checkpoint holds beside the model.
struct TrainerState {
  std::vector<engine::GroupScalars>& groups;
  std::optional<engine::Scheduler>& scheduler;
};

// Collective. `tag` empty: "global_step<n>".
void save_training_of(ShardedModel& model, const ::torch::nn::Module& module, TrainerState state,
                      const std::string& folder, std::string tag);
// Collective. `tag` empty: the one that `latest` names. Returns the checkpoint's path; nullopt:
// there is no `latest`.
std::optional<std::string> load_training_of(ShardedModel& model, const ::torch::nn::Module& module,
                                            TrainerState state, const std::string& folder,
                                            std::string tag);

}  // namespace strata::torch
