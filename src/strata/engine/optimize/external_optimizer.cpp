#include "strata/engine/optimize/external_optimizer.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
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
      masters_(shards, device, watch),
      wide_(
          shards.weights().units(), device, memory::Kind::kGradientShards, DType::kFloat32,
          [&shards](const Unit& unit) { return shards.states_on_host(unit); },
          [this](const Unit& unit) { return gradient_moves(unit); }) {
  shards.gradients().keep_in_32();  // it works on them in place
}

void ExternalOptimizer::take_whole(comm::Collectives& collectives, const std::string& name,
                                   bool together) {
  if (collectives.shard_position().count == 1) return;  // this rank's parts are whole
  collectives_ = &collectives;
  whole_.emplace(shards_, collectives, device_, WholeParameters::Options{name, together});
}

void ExternalOptimizer::prepare() {
  if (prepared_) return;
  segments_.clear();
  make_stages();
  shards_.weights().back_all();  // at once: every growth costs a mapping, here and at every peer
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = masters_.of(shard);
    const std::span<float> weight =
        on_drive(shard) ? shard_in(*master_stage_, unit) : masters_.values(unit);
    if (whole_) continue;
    const bool on_host = on_drive(shard) || shards_.states_on_host(unit);
    for (const plan::ParamSegment& segment : shard.segments) {
      const std::size_t numel = (segment.end - segment.begin).size();
      segments_.push_back({segment.param, segment.group,
                           weight.subspan(segment.begin.size(), numel), on_drive(shard), on_host});
    }
  }
  if (whole_) {
    whole_->prepare();
    for (const auto& [param, owned] : whole_->owned()) {
      const bool on_host = shards_.states_on_host(shards_.weights().unit_of(param));
      segments_.push_back(
          {param, shards_.weights().param(param).group, owned.weight(), false, on_host});
    }
  }
  prepared_ = true;
}

void ExternalOptimizer::make_stages() {
  Bytes largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (on_drive(shard))
      largest = std::max(largest, bytes_of(masters_.of(shard).layout.shard(), DType::kFloat32));
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
  if (whole_) whole_->free();
  masters_.free();
  prepared_ = false;
}

// The gradients of a trainable unit; empty if it got none.
std::span<float> ExternalOptimizer::scaled_gradient(const Unit& unit, float scale) {
  GradientShards& gradients = shards_.gradients();
  if (!gradients.filled(unit.id)) return {};
  const std::span<float> values = gradients.values(unit.id);
  const Bytes bytes(masters_.is_far(unit) ? values.size_bytes() : 0);
  if (!gradient_moves(unit)) {
    if (scale != 1.0F) masters_.move(bytes, bytes, [&] { multiply(values, values, scale); });
    return values;
  }
  const std::span<float> wide = wide_.floats_of(unit);
  masters_.move(Bytes(), bytes, [&] { multiply(wide, values, scale); });
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
    return masters_.move_copy(unit, stage, access);
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
  const Unit& unit = masters_.of(shard);
  GradientShards& from = shards_.gradients();
  if (!from.filled(unit.id)) return;
  shards_.weights().masters().adopt_written(unit.id);
  const std::span<float> values = from.values(unit.id);
  const std::span<float> scaled = shard_in(*gradient_stage_, unit);
  const Bytes bytes(from.on_host(unit.id) ? 0 : values.size_bytes());
  masters_.move(Bytes(), bytes, [&] { multiply(scaled, values, scale); });
  move_masters(unit, offload::Access::kRead);
  device_.compute_stream().synchronize();
  std::vector<std::span<float>> gradients(first_segment);
  lend_gradients(shard, scaled, gradients);
  gradients.resize(segments_.size());
  update_(gradients);
  move_masters(unit, offload::Access::kReadWrite);
  if (shards_.weights().master_form(unit.id) != plan::MasterForm::kShard)
    masters_.round(shard, left_out());
  device_.compute_stream().synchronize();  // the next unit writes to the stage
}

// Parameters that the step does not change.
ExternalMasters::Skips ExternalOptimizer::left_out() {
  return [this](int param) {
    const GradientShards& gradients = shards_.gradients();
    return !gradients.filled(shards_.weights().unit_of(param).id) || gradients.left_out(param);
  };
}

void ExternalOptimizer::step(std::span<const GroupScalars> /*groups*/, const GradientScale& scale,
                             std::span<const int> /*first*/, const Updated& updated) {
  STRATA_ASSERT(update_ != nullptr);
  prepare();
  ++steps_;
  if (whole_) {
    update_whole(scale.value);
    for (const OptimizerShards::UnitShard& shard : shards_.units()) updated(shard.unit, {});
    return;
  }
  if (!std::ranges::all_of(shards_.units(), [this](const auto& shard) { return on_drive(shard); }))
    update_resident(scale.value);
  std::size_t first_segment = 0;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (on_drive(shard))
      update_on_drive(shard, first_segment, scale.value);
    else
      masters_.take_back(shard, left_out());
    first_segment += shard.segments.size();
    updated(shard.unit, {});
  }
}

// All units that are not on drives, in one call.
void ExternalOptimizer::update_resident(float scale) {
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (!on_drive(shard)) masters_.read(masters_.of(shard));
  }
  std::vector<std::span<float>> gradients;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const bool leaves_out = on_drive(shard);
    lend_gradients(shard,
                   leaves_out ? std::span<float>() : scaled_gradient(masters_.of(shard), scale),
                   gradients);
  }
  await_far();
  update_(gradients);
}

// The host is to work on states that lie there.
void ExternalOptimizer::await_far() {
  if (std::ranges::any_of(shards_.units(),
                          [this](const auto& s) { return masters_.is_far(masters_.of(s)); }))
    device_.compute_stream().synchronize();
}

// The present masters go where segments() has them.
void ExternalOptimizer::bring_weights() {
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = masters_.of(shard);
    masters_.read(unit);
    if (whole_)
      whole_->bring(unit, std::as_bytes(masters_.values(unit)), WholeParameters::Values::kWeights);
  }
  await_far();
}

void ExternalOptimizer::take_back_all(const ExternalMasters::Skips& skips) {
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (whole_) {
      const std::span<float> masters = masters_.values(masters_.of(shard));
      whole_->send(masters_.of(shard), [&](int param, Numel begin, std::span<const float> values) {
        if (skips(param)) return;
        device_.copy(std::as_writable_bytes(masters.subspan(begin.size(), values.size())),
                     std::as_bytes(values), device_.compute_stream());
      });
    }
    masters_.take_back(shard, skips);
  }
}

// Every rank's call comes between two exchanges, so all agree on its outcome.
void ExternalOptimizer::update_whole(float scale) {
  const ExternalMasters::Skips none = left_out();
  bring_weights();
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const std::span<float> mine = scaled_gradient(masters_.of(shard), scale);
    if (mine.empty()) continue;
    whole_->bring(masters_.of(shard), std::as_bytes(mine), WholeParameters::Values::kGradients);
  }
  await_far();
  std::vector<std::span<float>> lent;
  for (const auto& [param, owned] : whole_->owned())
    lent.push_back(none(param) ? std::span<float>() : owned.gradient());
  run_and_agree(*collectives_, "updating the weights", [&] { update_(lent); });
  take_back_all(none);
}

void ExternalOptimizer::edit(const std::function<void()>& change) {
  prepare();
  if (std::ranges::any_of(shards_.units(), [this](const auto& s) { return on_drive(s); }))
    throw UsageError(
        "this optimizer's weights of training and evaluation differ (train(), eval()), and states "
        "on a drive are there in step() alone; write zero_optimization.offload_optimizer.device "
        "\"cpu\" or \"none\"");
  bring_weights();
  change();
  take_back_all([](int) { return false; });
  device_.compute_stream().synchronize();
}

}  // namespace strata::engine
