// Frozen parameters that may become trainable: each is in a param group without requiring a
// gradient, or requires a gradient without being in a group. As soon as one has both, the engine
// makes room for it and trains it from that forward on.
//
// Threads: one thread at a time; autograd's threads count while the caller waits for backward.
// Ownership: borrows all. Errors: those of engine::train_frozen().
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/parameter_set.h"

namespace strata::torch {

class FrozenParameters {
 public:
  FrozenParameters(engine::Engine& engine, const ParameterSet& parameters);

  // Adds parameters that are in no param group to this group. Those that require gradients are
  // trained from now on. Call it alike on every rank. UsageError for a parameter that is in a
  // group.
  void add_to_group(std::span<const int> params, int group);
  // Called before a pass begins; looks at each frozen parameter. Collective if a parameter was
  // unfrozen, which all ranks must do before the same pass.
  void train_unfrozen();
  // Collective: trains those of `params` that are frozen and in a group, whether or not they
  // require gradients yet.
  void train(std::span<const int> params);
  // Sets the function that is called with parameters that become trained.
  void on_trained(std::function<void(std::span<const int>)> told) { told_ = std::move(told); }

 private:
  // Whether the engine can train the parameter later.
  bool may_be_trained(int param) const;

  engine::Engine& engine_;
  const ParameterSet& parameters_;
  std::vector<int> frozen_;  // ascending
  std::function<void(std::span<const int>)> told_;
};

}  // namespace strata::torch
