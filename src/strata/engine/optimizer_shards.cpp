#include "strata/engine/optimizer_shards.h"

namespace strata::engine {

OptimizerShards::OptimizerShards(Weights& weights, GradientShards& gradients, int rank)
    : weights_(weights), gradients_(gradients) {
  for (const Unit& unit : weights.units()) {
    if (!unit.trainable()) continue;
    units_.push_back({unit.id, unit.layout.segments(rank, weights.params())});
  }
}

}  // namespace strata::engine
