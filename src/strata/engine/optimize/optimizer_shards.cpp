#include "strata/engine/optimize/optimizer_shards.h"

namespace strata::engine {

OptimizerShards::OptimizerShards(Weights& weights, GradientShards& gradients, int rank)
    : weights_(weights), gradients_(gradients) {
  for (const Unit& unit : weights.units()) {
    if (!unit.trainable()) continue;
    units_.push_back({unit.id, unit.layout.segments(rank, weights.params())});
  }
}

// A unit's part ends where the next one's begins.
void run_recorded(ShardedOptimizer& optimizer, StepRecorder& recorder,
                  std::span<const GroupScalars> groups, const GradientScale& scale,
                  std::span<const int> first, const ShardedOptimizer::Updated& updated) {
  StepRecorder::Recording recording = recorder.begin(Activity::kOptimizer, -1);
  optimizer.step(groups, scale, first, [&](int unit) {
    recorder.end(recording, unit);
    updated(unit);
    recording = recorder.begin(Activity::kOptimizer, -1);
  });
}

}  // namespace strata::engine
