// Makes parameters trainable that were frozen when the engine was made. Their units get masters,
// which begin at the weights, room for gradients, and states of the optimizer. Parameters that stay
// frozen in such a unit have room there, too, but get no gradients, and do not change.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: CommError where a rank does
// something else meanwhile, ConfigError where it unfreezes other parameters, both with their names;
// OutOfMemoryError, on every rank.
#pragma once

#include <span>

#include "strata/comm/collectives.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

class Unfreezing {
 public:
  // `optimizer`: null where no optimizer updates the weights.
  Unfreezing(Weights& weights, Reducer& reducer, OptimizerShards& shards,
             ShardedOptimizer* optimizer, comm::Collectives& collectives)
      : weights_(weights),
        reducer_(reducer),
        shards_(shards),
        optimizer_(optimizer),
        collectives_(collectives) {}

  // Collective, between passes, with no states offloaded: from now on these parameters get
  // gradients and updates, by the values of their groups. Bias correction counts their steps from
  // here.
  void train(std::span<const int> params);

 private:
  void make_room(std::span<const int> params);

  Weights& weights_;
  Reducer& reducer_;
  OptimizerShards& shards_;
  ShardedOptimizer* optimizer_;
  comm::Collectives& collectives_;
};

}  // namespace strata::engine
