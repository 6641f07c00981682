// Takes gradients where autograd would store them. A pre-hook on each parameter's AccumulateGrad
// node hands the gradient to the engine and gives autograd nothing, so `.grad` is never made. Hooks
// of the user (tensor hooks before, post-accumulate hooks after) keep working, since they are kept
// elsewhere. Threads: the hooks run in autograd's threads, one at a time for one device. Ownership:
// keeps the AccumulateGrad nodes alive (a tensor holds its node weakly); the hooks hold the
// receiver weakly through a shared switch, and do nothing once this object is gone.
// Errors: UsageError, thrown out of backward, for sparse gradients and gradients outside
// engine.backward().
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/parameter_set.h"

namespace strata::torch {

class GradientHooks {
 public:
  // Parameters must be at their full shape (ParameterSet::bind).
  GradientHooks(engine::Engine& engine, const ParameterSet& parameters);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  struct Nodes;
  std::unique_ptr<Nodes> nodes_;
};

}  // namespace strata::torch
