#include "strata/engine/optimize/external_optimizer.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {

namespace {

// Values of a unit's shard at the beginning of a buffer that units share.
std::span<float> shard_in(device::Memory& stage, const Unit& unit) {
  return {reinterpret_cast<float*>(stage.bytes().data()), unit.layout.shard().size()};
}

}  // namespace

ExternalOptimizer::ExternalOptimizer(OptimizerShards& shards, device::Device& device,
                                     offload::LinkWatch& watch)
    : shards_(shards),
      device_(device),
      watch_(watch),
      copies_(
          shards.weights().units(), device, memory::Kind::kMasterWeights, DType::kFloat32,
          [&shards](const Unit& unit) { return shards.states_on_host(unit); },
          [this](const Unit& unit) { return has_copy(unit); }),
      wide_(
          shards.weights().units(), device, memory::Kind::kGradientShards, DType::kFloat32,
          [&shards](const Unit& unit) { return shards.states_on_host(unit); },
          [this](const Unit& unit) { return gradient_moves(unit); }) {
  shards.gradients().keep_in_32();  // it works on them in place
}

std::span<float> ExternalOptimizer::masters_of(const Unit& unit) {
  if (shards_.states_on_drive(unit)) return shard_in(*master_stage_, unit);
  if (has_copy(unit)) return copies_.floats_of(unit);
  const std::span<std::byte> held = shards_.weights().masters().hold(unit.id);
  return {reinterpret_cast<float*>(held.data()), unit.layout.shard().size()};
}

void ExternalOptimizer::prepare() {
  if (prepared_) return;
  segments_.clear();
  make_stages();
  shards_.weights().back_all();  // at once: every growth costs a mapping, here and at every peer
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const std::span<float> weight = masters_of(of(shard));
    const bool on_host = on_drive(shard) || shards_.states_on_host(of(shard));
    for (const plan::ParamSegment& segment : shard.segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      segments_.push_back({segment.param, segment.group,
                           weight.subspan(segment.begin.size(), numel), on_drive(shard), on_host});
    }
  }
  prepared_ = true;
}

void ExternalOptimizer::make_stages() {
  Bytes largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (on_drive(shard))
      largest = std::max(largest, bytes_of(of(shard).layout.shard(), DType::kFloat32));
  }
  if (master_stage_ != nullptr && Bytes(master_stage_->bytes().size()) >= largest) return;
  if (largest == Bytes()) return;
  device_.compute_stream().synchronize();
  master_stage_ = offload::pinned_memory(device_, largest, memory::Kind::kStaging);
  gradient_stage_ = offload::pinned_memory(device_, largest, memory::Kind::kStaging);
}

void ExternalOptimizer::offload_states(bool masters) {
  wide_.free_on_device();
  if (!masters) return;
  segments_.clear();
  copies_.free_on_device();
  shards_.weights().masters().let_go();
  prepared_ = false;
}

// Copies weights that have a copy: from them to it (kRead), or from it to them.
void ExternalOptimizer::move_copy(const Unit& unit, std::span<float> values,
                                  offload::Access access) {
  const std::span<std::byte> copy = std::as_writable_bytes(values);
  const bool reads = access == offload::Access::kRead;
  const auto move_piece = [&](const WeightShards::Piece& piece) {
    const auto there =
        copy.subspan(bytes_of(piece.begin, DType::kFloat32).size(), piece.bytes.size());
    device_.copy(reads ? there : piece.bytes, reads ? piece.bytes : there,
                 device_.compute_stream());
  };
  // Offloaded weights are on the host, too.
  const bool on_host = shards_.states_on_host(unit) || shards_.states_on_drive(unit);
  const bool crosses = unit.offloaded != on_host;
  const Bytes bytes(crosses ? copy.size() : 0);
  const bool up = reads == unit.offloaded;
  move(up ? bytes : Bytes(), up ? Bytes() : bytes, [&] {
    shards_.weights().shards().for_each(unit.id, Numel(), unit.layout.shard(), access,
                                        device_.compute_stream(), move_piece);
  });
}

// The gradients of a trainable unit; empty if it got none.
std::span<float> ExternalOptimizer::scaled_gradient(const Unit& unit, float scale) {
  GradientShards& gradients = shards_.gradients();
  if (!gradients.filled(unit.id)) return {};
  const std::span<float> values = gradients.values(unit.id);
  const Bytes bytes(is_far(unit) ? values.size_bytes() : 0);
  if (!gradient_moves(unit)) {
    if (scale != 1.0F) move(bytes, bytes, [&] { multiply(values, values, scale); });
    return values;
  }
  const std::span<float> wide = wide_.floats_of(unit);
  move(Bytes(), bytes, [&] { multiply(wide, values, scale); });
  return wide;
}

// Appends the gradients of the shard's segments.
void ExternalOptimizer::lend_gradients(const OptimizerShards::UnitShard& shard,
                                       std::span<float> all,
                                       std::vector<std::span<float>>& gradients) {
  for (const plan::ParamSegment& segment : shard.segments) {
    const std::size_t numel = (segment.end - segment.begin).size();
    const bool none = all.empty() || shards_.gradients().left_out(segment.param);
    gradients.push_back(none ? std::span<float>() : all.subspan(segment.begin.size(), numel));
  }
}

// fp32 masters of a unit on a drive: to the stage (kRead), or from it.
void ExternalOptimizer::move_masters(const Unit& unit, offload::Access access) {
  const std::span<float> stage = shard_in(*master_stage_, unit);
  Weights& weights = shards_.weights();
  if (weights.master_form(unit.id) == plan::MasterForm::kShard)
    return move_copy(unit, stage, access);
  const auto bytes = std::as_writable_bytes(stage);
  weights.masters().for_each(
      unit.id, Numel(), unit.layout.shard(), access, [&](const StateRange& range) {
        const auto there = range.wanted(DType::kFloat32);
        const auto here = bytes.subspan(bytes_of(range.low, DType::kFloat32).size(), there.size());
        const bool reads = access == offload::Access::kRead;
        device_.copy(reads ? here : there, reads ? there : here, device_.compute_stream());
      });
}

// In a call of its own, whose other gradients are empty. A unit without a gradient does not change.
void ExternalOptimizer::update_on_drive(const OptimizerShards::UnitShard& shard,
                                        std::size_t first_segment, float scale) {
  const Unit& unit = of(shard);
  GradientShards& from = shards_.gradients();
  if (!from.filled(unit.id)) return;
  shards_.weights().masters().adopt_written(unit.id);
  const std::span<float> values = from.values(unit.id);
  const std::span<float> scaled = shard_in(*gradient_stage_, unit);
  const Bytes bytes(from.on_host(unit.id) ? 0 : values.size_bytes());
  move(Bytes(), bytes, [&] { multiply(scaled, values, scale); });
  move_masters(unit, offload::Access::kRead);
  device_.compute_stream().synchronize();
  std::vector<std::span<float>> gradients(first_segment);
  lend_gradients(shard, scaled, gradients);
  gradients.resize(segments_.size());
  update_(gradients);
  move_masters(unit, offload::Access::kReadWrite);
  if (shards_.weights().master_form(unit.id) != plan::MasterForm::kShard) round(shard);
  device_.compute_stream().synchronize();  // the next unit writes to the stage
}

// The unit's weights are what the update has made of its masters.
void ExternalOptimizer::take_back(const OptimizerShards::UnitShard& shard) {
  const Unit& unit = of(shard);
  if (has_copy(unit)) return move_copy(unit, copies_.floats_of(unit), offload::Access::kReadWrite);
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
  if (!std::ranges::all_of(shards_.units(), [this](const auto& shard) { return on_drive(shard); }))
    update_resident(scale.value);
  std::size_t first_segment = 0;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (on_drive(shard))
      update_on_drive(shard, first_segment, scale.value);
    else
      take_back(shard);
    first_segment += shard.segments.size();
    updated(shard.unit, {});
  }
}

// All units that are not on drives, in one call.
void ExternalOptimizer::update_resident(float scale) {
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (!on_drive(shard)) shards_.weights().masters().adopt_written(shard.unit);
  }
  std::vector<std::span<float>> gradients;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const bool leaves_out = on_drive(shard);
    lend_gradients(shard, leaves_out ? std::span<float>() : scaled_gradient(of(shard), scale),
                   gradients);
  }
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (has_copy(of(shard)))
      move_copy(of(shard), copies_.floats_of(of(shard)), offload::Access::kRead);
  }
  if (std::ranges::any_of(shards_.units(), [this](const auto& s) { return is_far(of(s)); }))
    device_.compute_stream().synchronize();
  update_(gradients);
}

}  // namespace strata::engine
