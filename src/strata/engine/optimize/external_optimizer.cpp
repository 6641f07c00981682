#include "strata/engine/optimize/external_optimizer.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {

using offload::Link;

ExternalOptimizer::ExternalOptimizer(OptimizerShards& shards, device::Device& device,
                                     offload::LinkWatch& watch)
    : shards_(shards),
      device_(device),
      watch_(watch),
      copies_(shards, device, memory::Kind::kMasterWeights,
              [this](const Unit& unit) { return has_copy(unit); }),
      wide_(shards, device, memory::Kind::kGradientShards,
            [this](const Unit& unit) { return gradient_moves(unit); }) {}

bool ExternalOptimizer::has_copy(const Unit& unit) const {
  return shards_.weights().master_form(unit.id) == plan::MasterForm::kShard &&
         (unit.offloaded || is_far(unit));
}

bool ExternalOptimizer::gradient_moves(const Unit& unit) const {
  const GradientShards& gradients = shards_.gradients();
  if (gradients.dtype() != DType::kFloat32) return true;
  return device_.runs_ahead() && gradients.on_host(unit.id) != shards_.states_on_host(unit);
}

std::span<float> ExternalOptimizer::masters_of(const Unit& unit) {
  if (has_copy(unit)) return copies_.of(unit);
  const std::span<std::byte> held = shards_.weights().masters().hold(unit.id);
  return {reinterpret_cast<float*>(held.data()), unit.layout.shard().size()};
}

void ExternalOptimizer::prepare() {
  if (prepared_) return;
  segments_.clear();
  shards_.weights().back_all();  // at once: every growth costs a mapping, here and at every peer
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const std::span<float> weight = masters_of(of(shard));
    const bool on_host = shards_.states_on_host(of(shard));
    for (const plan::ParamSegment& segment : shard.segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      segments_.push_back(
          {segment.param, segment.group, weight.subspan(segment.begin.size(), numel), on_host});
    }
  }
  prepared_ = true;
}

void ExternalOptimizer::add(int /*unit*/, bool /*is_new*/) {
  prepared_ = false;
  prepare();
}

void ExternalOptimizer::offload_states(bool masters) {
  wide_.free_on_device();
  if (!masters) return;
  segments_.clear();
  copies_.free_on_device();
  shards_.weights().masters().let_go();
  prepared_ = false;
}

void ExternalOptimizer::move(Bytes up, Bytes down, const offload::LinkWatch::Call& queue) {
  if (!device_.runs_ahead()) return queue();
  device::Stream& stream = device_.compute_stream();
  watch_.copy(Link::kUp, up, stream, [&] { watch_.copy(Link::kDown, down, stream, queue); });
}

// Copies weights that have a copy: from them to it (kRead), or from it to them.
void ExternalOptimizer::move_copy(const Unit& unit, offload::Access access) {
  const std::span<std::byte> copy = std::as_writable_bytes(copies_.of(unit));
  const bool reads = access == offload::Access::kRead;
  const auto move_piece = [&](const WeightShards::Piece& piece) {
    const auto there =
        copy.subspan(bytes_of(piece.begin, DType::kFloat32).size(), piece.bytes.size());
    device_.copy(reads ? there : piece.bytes, reads ? piece.bytes : there,
                 device_.compute_stream());
  };
  // Offloaded weights are on the host, too.
  const bool crosses = unit.offloaded != shards_.states_on_host(unit);
  const Bytes bytes(crosses ? copy.size() : 0);
  const bool up = reads == unit.offloaded;
  move(up ? bytes : Bytes(), up ? Bytes() : bytes, [&] {
    shards_.weights().shards().for_each(unit.id, Numel(), unit.layout.shard(), access, move_piece);
  });
}

// The gradients of a trainable unit; empty if it got none.
std::span<float> ExternalOptimizer::scaled_gradient(const Unit& unit, float scale) {
  GradientShards& gradients = shards_.gradients();
  if (!gradients.filled(unit.id)) return {};
  const std::span<float> values = gradients.values(unit.id);
  const Bytes bytes(is_far(unit) ? values.size_bytes() : 0);
  device::Stream& stream = device_.compute_stream();
  if (!gradient_moves(unit)) {
    if (scale != 1.0F) move(bytes, bytes, [&] { device_.scale(values, values, scale, stream); });
    return values;
  }
  const std::span<float> wide = wide_.of(unit);
  move(Bytes(), bytes, [&] { device_.scale(wide, values, scale, stream); });
  return wide;
}

// By segment.
std::vector<std::span<float>> ExternalOptimizer::lend_gradients(float scale) {
  std::vector<std::span<float>> gradients;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const std::span<float> all = scaled_gradient(of(shard), scale);
    for (const plan::ParamSegment& segment : shard.segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      const bool none = all.empty() || shards_.gradients().left_out(segment.param);
      gradients.push_back(none ? std::span<float>() : all.subspan(segment.begin.size(), numel));
    }
  }
  return gradients;
}

// The unit's weights are what the update has made of its masters.
void ExternalOptimizer::take_back(const OptimizerShards::UnitShard& shard) {
  const Unit& unit = of(shard);
  if (has_copy(unit)) return move_copy(unit, offload::Access::kReadWrite);
  const Bytes masters = bytes_of(unit.layout.shard(), DType::kFloat32);
  move(is_far(unit) ? masters : Bytes(), unit.offloaded ? unit.layout.shard_bytes() : Bytes(),
       [&] { round(shard); });
}

// Parameters that the step has left out keep their weights: fp64 weights have more bits than their
// masters.
void ExternalOptimizer::round(const OptimizerShards::UnitShard& shard) {
  const GradientShards& gradients = shards_.gradients();
  Weights& weights = shards_.weights();
  if (of(shard).layout.dtype() != DType::kFloat64) {
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
  for (const OptimizerShards::UnitShard& shard : shards_.units())
    shards_.weights().masters().adopt_written(shard.unit);
  const auto is_host_work = [this](const OptimizerShards::UnitShard& shard) {
    return is_far(of(shard));
  };
  const std::vector<std::span<float>> gradients = lend_gradients(scale.value);
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (has_copy(of(shard))) move_copy(of(shard), offload::Access::kRead);
  }
  if (std::ranges::any_of(shards_.units(), is_host_work)) device_.compute_stream().synchronize();
  update_(gradients);
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    take_back(shard);
    updated(shard.unit);
  }
}

}  // namespace strata::engine
