// The last part of a step: the optimizer updates this rank's shards, and every rank gets the new
// shards of other ranks that it holds.
//
// On a device that runs ahead with one-sided gathers, the optimizer first updates the units that
// every rank's next forward needs first. Ranks gather those, in rounds, while it updates the rest.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: after the update has begun, any
// error leaves the weights of two steps. If a rank's optimizer fails, that rank throws the
// optimizer's error, and all others throw an error of the same class that names the rank. So the
// collectives stay good, and weights can be loaded. An error after that ends the collectives, with
// its reason. CommError from the collectives.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

class WeightUpdate {
 public:
  WeightUpdate(Weights& weights, Gatherer& gatherer, StepRecorder& recorder,
               comm::Collectives& collectives, device::Device& device)
      : weights_(weights),
        gatherer_(gatherer),
        recorder_(recorder),
        collectives_(collectives),
        device_(device) {}

  // Collective. From its beginning to its end no rank gathers the changing units.
  void run(ShardedOptimizer& optimizer, std::span<const GroupScalars> groups,
           const GradientScale& scale);

  // Collective: copies the parts of these units' slices that other ranks own to this rank's copies
  // of them (ShardPosition::parts).
  void complete_slices(std::span<const int> units);
  void complete_slices(Changed changed);

 private:
  bool fetches_ahead() const;
  std::vector<int> first_needed_by_all();  // collective
  std::vector<std::vector<int>> plan_rounds(std::span<const int> updated) const;
  std::exception_ptr update_shards(ShardedOptimizer& optimizer,
                                   std::span<const GroupScalars> groups,
                                   const GradientScale& scale);
  void agree_on(const std::exception_ptr& mine);
  void bring_new_shards();
  const Unit& unit(int index) const { return nth(weights_.units(), index); }

  Weights& weights_;
  Gatherer& gatherer_;
  StepRecorder& recorder_;
  comm::Collectives& collectives_;
  device::Device& device_;
};

}  // namespace strata::engine
