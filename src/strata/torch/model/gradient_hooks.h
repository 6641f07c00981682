// Takes gradients where autograd would store them. A pre-hook on each trainable parameter's
// AccumulateGrad node hands the gradient to the engine and gives autograd nothing, so autograd
// makes no `.grad`. Hooks of the user's see what they would in torch: tensor hooks run before; for
// post-accumulate hooks `.grad` is this pass's gradient on this rank, divided and scaled as it will
// count, and what they leave there goes to the engine when they have run. The first gradient of a
// backward pass begins the pass, unless it runs already (AutogradPass).
//
// A parameter that was frozen when the engine was made is hooked, too: FrozenParameters sees to it
// that there is room for its gradient when one comes. One that requires gradients and is in no
// param group is left to autograd, `.grad` and all.
//
// Threads: the hooks run in autograd's threads, one at a time for one device. Ownership:
// keeps the AccumulateGrad nodes alive (a tensor holds its node weakly); the hooks hold the
// receiver weakly through a shared switch, and do nothing once this object is gone.
// A sparse gradient is made dense, which is said once in a process.
// Errors: UsageError, thrown out of backward, for frozen parameters that cannot be trained (tiles).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/autograd_pass.h"
#include "strata/torch/model/parameter_set.h"

namespace strata::torch {

class GradientHooks {
 public:
  // Parameters must be at their full shape (ParameterSet::bind).
  GradientHooks(engine::Engine& engine, const ParameterSet& parameters, AutogradPass& pass);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Whether the graph that runs in this thread stores a gradient of a trainable parameter, as far
  // as autograd knows it beforehand.
  bool stored_by_running_graph() const;
  // A gradient that autograd does not store: of a tile, by the operation that used it.
  void take(int param, const at::Tensor& gradient);
  // In place of take(), of a tile: the operation writes its gradient into `place`, of the shape of
  // the parameter, times `factor`, and beside what `holds`; end_take() follows.
  struct Destination {
    at::Tensor place;
    bool holds = false;
    double factor = 1.0;
  };
  Destination begin_take(int param);
  void end_take(int param);
  // A pass begins, whose gradients are multiplied by `factor` when they come; has brought some; is
  // over, or has failed.
  void begin_pass(double factor);
  bool took() const;
  void end_pass();
  void abandon_pass() noexcept;

 private:
  struct Nodes;
  std::unique_ptr<Nodes> nodes_;
};

}  // namespace strata::torch
