// Parameters and buffers of a torch::nn::Module under the engine, saved to and loaded from
// safetensors by their names in the module. Collective. Threads: the engine's. Memory: the staging
// rings of engine/checkpoint/weight_saver.h and weight_loader.h, independent of the model's size.
// Errors: FormatError for a checkpoint that does not fit the module (nothing is changed then),
// IoError; on every rank, when any rank meets one.
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

// Makes `folder` if it does not exist.
void save_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& folder);

// `path`: a folder, or one .safetensors file. Buffers are filled in place.
void load_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& path);

}  // namespace strata::torch
