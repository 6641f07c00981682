// The last part of a step: the optimizer updates this rank's shards, and every rank gets the new
// shards of other ranks that it holds.
//
// On a device that runs ahead with one-sided gathers, the optimizer first updates the units that
// every rank's next forward needs first. Ranks gather those, in rounds, while it updates the rest.
//
// Errors (Engine says what they leave): if a rank's optimizer fails, that rank throws its error,
// and all others throw one of the same class that names the rank. The collectives stay good, and
// weights can be loaded. An error after that ends the collectives, with its reason.
//
// Units may also be updated early, one by one, in the backward pass that ends a step
// (EngineOptions::update_in_backward). run() then updates the others.
//
// Threads: one thread at a time. Ownership: borrows the engine.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/sharded_optimizer.h"

namespace strata::engine {

class Engine;

class WeightUpdate {
 public:
  explicit WeightUpdate(Engine& engine) : engine_(engine) {}

  // Collective: the parts of these units' slices that other ranks own go to this rank's copies of
  // them (ShardPosition::parts).
  void complete_slices(std::span<const int> indices);
  void complete_slices(Changed changed);

  // The function that updates a unit when its gradients are complete, by these numbers, of which
  // run() must get the same; null: nothing is updated before run().
  std::function<void(int unit)> in_backward(std::span<const GroupScalars> groups);
  // No run() follows those updates. Returns whether there were some.
  bool forget_early();

  // Collective. From its beginning to its end no rank gathers the changing units.
  void run(std::span<const GroupScalars> groups, const GradientScale& scale);

 private:
  bool fetches_ahead() const;
  std::vector<int> first_needed_by_all();
  std::vector<std::vector<int>> plan_rounds(std::span<const int> updated) const;
  std::exception_ptr update_shards(std::span<const GroupScalars> groups,
                                   const GradientScale& scale);
  void hand_over(Unit& unit, std::vector<std::shared_ptr<device::Event>> ended);
  void agree_on(const std::exception_ptr& mine);
  void bring_new_shards();

  Engine& engine_;
  std::vector<GroupScalars> early_;  // by which units of the coming step were updated
};

}  // namespace strata::engine
