#include "strata/engine/external_optimizer.h"

#include "strata/base/error.h"

namespace strata::engine {

ExternalOptimizer::ExternalOptimizer(OptimizerShards& shards, device::Device& device)
    : shards_(shards), device_(device) {}

void ExternalOptimizer::prepare() {
  if (!gradients_.empty()) return;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = shards_.weights().units()[static_cast<std::size_t>(shard.unit)];
    const std::span<std::byte> master = shards_.weights().hold_master(shard.unit);
    gradients_.push_back(device_.allocate(bytes_of(unit.layout.shard(), DType::kFloat32),
                                          memory::Kind::kGradientShards));
    auto* weight = reinterpret_cast<float*>(master.data());
    auto* gradient = reinterpret_cast<float*>(gradients_.back()->bytes().data());
    for (const plan::GroupSegment& segment : shard.segments) {
      const std::size_t begin = segment.begin.size();
      const std::size_t numel = (segment.end - segment.begin).size();
      segments_.push_back({segment.group, {weight + begin, numel}, {gradient + begin, numel}});
    }
  }
}

void ExternalOptimizer::step(std::span<const GroupScalars> /*groups*/, const GradientScale& scale,
                             std::span<const int> /*first*/, const Updated& updated) {
  STRATA_ASSERT(update_ != nullptr);
  prepare();
  ++steps_;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const int unit = shards_.units()[i].unit;
    const std::span<std::byte> target = gradients_[i]->bytes();
    if (!shards_.gradients().filled(unit)) {
      device_.fill_zero(target, device_.compute_stream());
      continue;
    }
    const std::span<const float> values = shards_.gradients().values(unit);
    device_.scale({reinterpret_cast<float*>(target.data()), values.size()}, values, scale.value,
                  device_.compute_stream());
  }
  update_();
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    shards_.weights().round_masters(shard.unit);
    updated(shard.unit);
  }
}

}  // namespace strata::engine
