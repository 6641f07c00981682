#include "strata/engine/optimize/external_optimizer.h"

#include "strata/base/error.h"

namespace strata::engine {

ExternalOptimizer::ExternalOptimizer(OptimizerShards& shards, device::Device& device)
    : shards_(shards), device_(device), widened_(shards.units().size()) {}

void ExternalOptimizer::prepare() {
  if (prepared_) return;
  segments_.clear();
  shards_.weights().back_all();  // at once: every growth costs a mapping, here and at every peer
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    auto* weight = reinterpret_cast<float*>(shards_.weights().masters().hold(shard.unit).data());
    for (const plan::ParamSegment& segment : shard.segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      segments_.push_back({segment.param, segment.group, {weight + segment.begin.size(), numel}});
    }
  }
  prepared_ = true;
}

void ExternalOptimizer::add(int /*unit*/, bool /*is_new*/) {
  widened_.resize(shards_.units().size());
  prepared_ = false;
  prepare();
}

void ExternalOptimizer::park(bool masters) {
  for (auto& memory : widened_) memory.reset();
  if (!masters) return;
  segments_.clear();
  shards_.weights().masters().let_go();
  prepared_ = false;
}

// Of the trainable unit `index`; empty where none came.
std::span<float> ExternalOptimizer::scaled_gradient(std::size_t index, float scale) {
  const int unit = shards_.units()[index].unit;
  GradientShards& gradients = shards_.gradients();
  if (!gradients.filled(unit)) return {};
  const std::span<float> values = gradients.values(unit);
  if (gradients.dtype() == DType::kFloat32) {
    if (scale != 1.0F) device_.scale(values, values, scale, device_.compute_stream());
    return values;
  }
  std::unique_ptr<device::Memory>& memory = widened_[index];
  if (memory == nullptr)
    memory = device_.allocate(Bytes(values.size_bytes()), memory::Kind::kGradientShards);
  const std::span<float> wide{reinterpret_cast<float*>(memory->bytes().data()), values.size()};
  device_.scale(wide, values, scale, device_.compute_stream());
  return wide;
}

// What the optimizer has left out keeps its weights: fp64 ones are more than their masters.
void ExternalOptimizer::round(const OptimizerShards::UnitShard& shard) {
  const GradientShards& gradients = shards_.gradients();
  Weights& weights = shards_.weights();
  const bool wide =
      weights.units()[static_cast<std::size_t>(shard.unit)].layout.dtype() == DType::kFloat64;
  if (!wide) {
    weights.masters().round(shard.unit);
    return;
  }
  if (!gradients.filled(shard.unit)) return;
  for (const plan::ParamSegment& segment : shard.segments) {
    if (!gradients.left_out(segment.param))
      weights.masters().round(shard.unit, segment.begin, segment.end);
  }
}

void ExternalOptimizer::step(std::span<const GroupScalars> /*groups*/, const GradientScale& scale,
                             std::span<const int> /*first*/, const Updated& updated) {
  STRATA_ASSERT(update_ != nullptr);
  prepare();
  ++steps_;
  std::vector<std::span<float>> gradients;
  for (std::size_t i = 0; i < shards_.units().size(); ++i) {
    shards_.weights().masters().adopt_written(shards_.units()[i].unit);
    const std::span<float> all = scaled_gradient(i, scale.value);
    for (const plan::ParamSegment& segment : shards_.units()[i].segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      const bool none = all.empty() || shards_.gradients().left_out(segment.param);
      gradients.push_back(none ? std::span<float>() : all.subspan(segment.begin.size(), numel));
    }
  }
  update_(gradients);
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    round(shard);
    updated(shard.unit);
  }
}

}  // namespace strata::engine
