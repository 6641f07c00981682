// Takes gradients where autograd would store them. A pre-hook on each trainable parameter's
// AccumulateGrad node hands the gradient to the engine and gives autograd nothing, so autograd
// makes no `.grad`. Users' hooks see the same as in torch. Tensor hooks run before. For
// post-accumulate hooks `.grad` is this pass's gradient on this rank, divided and scaled as it will
// count; when they have run, the engine takes the tensor that they leave there. The first gradient
// of a backward pass begins the pass, unless it runs already (AutogradPass).
//
// A parameter that was frozen when the engine was made has a hook, too: FrozenParameters makes room
// for its gradient when one comes. For a parameter that requires gradients but is in no param
// group, autograd stores `.grad` as usual.
//
// Threads: the hooks run in autograd's threads, one at a time for one device. Ownership:
// keeps the AccumulateGrad nodes alive (a tensor holds its node weakly); the hooks hold the
// receiver weakly through a shared switch, and do nothing once this object is gone.
// A sparse gradient is made dense; a warning says so once in a process.
// Errors: UsageError, thrown out of backward, for frozen parameters that cannot be trained (tiles).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

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
  // Takes a gradient that autograd does not store: a tile's, from the operation that used it.
  void take(int param, const at::Tensor& gradient);
  // Used in place of take() for a tile: the operation writes its gradient, times `factor`, into
  // `place`, which has the parameter's shape. `holds`: it adds to the gradient there. end_take()
  // follows.
  struct Destination {
    at::Tensor place;
    bool holds = false;
    double factor = 1.0;
  };
  Destination begin_take(int param);
  void end_take(int param);
  // begin_pass(): a pass begins, whose gradients are multiplied by `factor`. took(): it has brought
  // some. end_pass(), abandon_pass(): it has ended, or has failed.
  void begin_pass(double factor);
  bool took() const;
  void end_pass();
  void abandon_pass() noexcept;

 private:
  struct Nodes;
  std::unique_ptr<Nodes> nodes_;
};

}  // namespace strata::torch
