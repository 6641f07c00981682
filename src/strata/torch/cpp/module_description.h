// A torch::nn::Module as the engine sees it: its parameters by name, each once, and its tree of
// modules. Class names are as a configuration spells them: without namespace and without the "Impl"
// of libtorch's module holders ("Block" for my::BlockImpl). Pure; the description shares the
// module's tensors and borrows its modules.
#pragma once

#include <torch/nn/module.h>

#include <unordered_map>
#include <vector>

#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

struct ModuleDescription {
  ModelInput input;
  std::vector<const ::torch::nn::Module*> modules;  // by index into input.tree
};

// `groups`: the optimizer's param group of a parameter; absent: group 0.
ModuleDescription describe_module(
    const ::torch::nn::Module& root,
    const std::unordered_map<const c10::TensorImpl*, int>& groups = {});

}  // namespace strata::torch
