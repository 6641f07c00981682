// Saves and loads a torch::nn::Module under the engine, for C++ programs: its parameters and
// buffers, as safetensors by their names in the module, or the state of its training. Collective.
// Threads: the engine's. Memory: the staging rings of engine/checkpoint/weight_saver.h and
// weight_loader.h, independent of the model's size. Errors: FormatError for a checkpoint that does
// not fit the module (nothing is changed then), IoError; on every rank, when any rank meets one.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/engine/schedule/schedule.h"
#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

// Makes `folder` if it does not exist.
void save_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& folder);

// `path`: a folder, or one .safetensors file. Buffers are filled in place.
void load_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& path);

// Parts of a trainer that a checkpoint holds beside the model.
struct TrainerState {
  std::vector<engine::GroupScalars>& groups;
  std::optional<engine::Scheduler>& scheduler;
};

// Training checkpoints: the engine's shards, the module's buffers, and the trainer's own state.
// Files and folders are those of Python's engine.save_checkpoint, so each face loads the other's
// checkpoints. `tag` empty: "global_step<n>".
void save_training_of(ShardedModel& model, const ::torch::nn::Module& module, TrainerState state,
                      const std::string& folder, std::string tag);
// `tag` empty: the one that `latest` names. Returns the checkpoint's path; nullopt:
// there is no `latest`.
std::optional<std::string> load_training_of(ShardedModel& model, const ::torch::nn::Module& module,
                                            TrainerState state, const std::string& folder,
                                            std::string tag);

}  // namespace strata::torch
