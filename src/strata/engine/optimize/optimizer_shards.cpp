#include "strata/engine/optimize/optimizer_shards.h"

namespace strata::engine {

OptimizerShards::OptimizerShards(Weights& weights, GradientShards& gradients, int rank)
    : weights_(weights), gradients_(gradients), rank_(rank), index_(weights.units().size(), kNone) {
  for (const Unit& unit : weights.units()) {
    if (unit.trainable()) add(unit.id);
  }
}

void OptimizerShards::add(int unit) {
  std::size_t& index = index_[static_cast<std::size_t>(unit)];
  if (index == kNone) {
    index = units_.size();
    units_.push_back({unit, {}});
  }
  units_[index].segments =
      weights_.units()[static_cast<std::size_t>(unit)].layout.segments(rank_, weights_.params());
}

std::vector<int> OptimizerShards::order(std::span<const int> first) const {
  std::vector<int> result(first.begin(), first.end());
  std::vector<bool> listed(units_.size());
  for (const int unit : first) listed[index_of(unit)] = true;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (!listed[i]) result.push_back(units_[i].unit);
  }
  STRATA_ASSERT(result.size() == units_.size());
  return result;
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
