// Parameters that the engine does not train, and that may become trained: they are in a param group
// and require no gradient, or the other way round. As soon as one is in a group and requires
// gradients, the engine makes room for it and trains it from that forward on.
//
// Threads: one thread at a time; autograd's threads count while the caller waits for backward.
// Ownership: borrows all. Errors: those of engine::Unfreezing.
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

  // Parameters that are in no param group are in this one from now on, and trained where they
  // require gradients. The same on every rank. UsageError for one that is in a group.
  void add_to_group(std::span<const int> params, int group);
  // Before a pass begins. A look at each frozen parameter; collective where one was unfrozen, which
  // all ranks have to do before the same pass.
  void train_unfrozen();
  // Collective: the same for those of these that are frozen and in a group, whether they require
  // gradients yet or not.
  void train(std::span<const int> params);
  // Who is told of parameters that are trained from now on.
  void on_trained(std::function<void(std::span<const int>)> told) { told_ = std::move(told); }

 private:
  // In a way that training it later could be provided for.
  bool may_be_trained(int param) const;

  engine::Engine& engine_;
  const ParameterSet& parameters_;
  std::vector<int> frozen_;  // ascending
  std::function<void(std::span<const int>)> told_;
};

}  // namespace strata::torch
