// The last part of a step: the optimizer updates this rank's shards, and every rank gets what it
// holds of the others' new ones.
//
// On a device that runs ahead, and where gathers are one-sided, what the next forward of every rank
// needs first is updated first, and fetched while the rest is updated, in rounds.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: once the update has begun any
// error leaves the weights of two steps. An error of a rank's optimizer is told to all ranks, which
// throw one of its class that names the rank; the rank itself throws its own. So the collectives
// stay good, and weights can be loaded. An error after that ends them with its reason. CommError as
// ever.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/optimizer_shards.h"
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

  // Collective. Nobody gathers what changes from its beginning to its end.
  void run(ShardedOptimizer& optimizer, std::span<const GroupScalars> groups,
           const GradientScale& scale);

  // Collective: brings what other ranks own of these units' slices to where this one holds it for
  // them (ShardPlace::parts).
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
  const Unit& unit(int index) const { return weights_.units()[static_cast<std::size_t>(index)]; }

  Weights& weights_;
  Gatherer& gatherer_;
  StepRecorder& recorder_;
  comm::Collectives& collectives_;
  device::Device& device_;
};

}  // namespace strata::engine
