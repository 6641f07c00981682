#include "strata/engine/optimize/adam_optimizer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// Parts that the host's lane has before it, at most: each takes a few places in queues of a driver.
constexpr std::uint32_t kQueued = 128;

}  // namespace

AdamOptimizer::AdamOptimizer(OptimizerShards& shards, device::Device& device,
                             offload::StateStore& states, bool decoupled,
                             const EngineOptions& options, offload::LinkWatch& watch)
    : shards_(shards),
      device_(device),
      store_(states),
      watch_(watch),
      lanes_(options.lanes),
      states_(shards, states, decoupled, options.moment_dtype),
      dealer_(options.lanes) {
  for (const OptimizerShards::UnitShard& shard : shards.units()) {
    const Unit& unit = nth(shards.weights().units(), shard.unit);
    if (unit.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  }
}

void AdamOptimizer::add(int unit, bool is_new) {
  if (!is_new) return;  // its states are there, and each step has left its parameter out
  const Unit& of = nth(shards_.weights().units(), unit);
  if (of.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  for (const int param : of.spec.params) states_.add_param(param);
  if (states_.prepared()) states_.add({&shards_.units()[shards_.index_of(unit)], 1});
  if (stage_ == nullptr) return;
  drop_lanes();
  make_lanes();
}

AdamOptimizer::Remote AdamOptimizer::remote_of(const Unit& unit) const {
  return {.states = unit.spec.place.states.value_or(store_.tier()) != memory::Tier::kDevice,
          .gradient = shards_.gradients().on_host(unit.id),
          .weights = unit.offloaded};
}

bool AdamOptimizer::host_can_update(const Unit& unit) const {
  const bool weights_near =
      unit.offloaded && shards_.weights().shards().tier_of(unit) == memory::Tier::kHost;
  return lanes_.threads > 0 && lanes_.which != UpdateWhere::kDevice && weights_near &&
         shards_.states_on_host(unit) && shards_.gradients().on_host(unit.id) &&
         unit.layout.dtype() != DType::kFloat64 && !unit.spec.tile();
}

// A device that does not run ahead works on the host's memory as on its own.
void AdamOptimizer::make_lanes() {
  if (!device_.runs_ahead()) return;
  Bytes largest;
  bool helps = false;
  bool widens = false;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    const Remote remote = remote_of(unit);
    Bytes bytes;
    if (remote.states) bytes += states_.bytes_of_unit(unit);
    if (remote.gradient) bytes += bytes_of(unit.layout.shard(), DType::kFloat32);
    if (remote.weights) bytes += unit.layout.shard_bytes();
    largest = std::max(largest, bytes);
    if (remote.gradient && shards_.gradients().resting_dtype(unit.id) != DType::kFloat32)
      widens = true;
    helps = helps || host_can_update(unit);
  }
  if (largest > Bytes()) stage_ = std::make_unique<offload::DeviceStage>(device_, largest, watch_);
  if (widens) widened_ = device_.allocate(stage_->share(), memory::Kind::kStaging);
  if (helps) host_ = std::make_unique<HostLane>(device_, watch_, lanes_);
}

void AdamOptimizer::drop_lanes() {
  device_.compute_stream().synchronize();
  host_.reset();
  stage_.reset();
  widened_.reset();
}

// The states' part of what the stage has room for, beside gradient and weights.
Bytes AdamOptimizer::range_limit(const Unit& unit, std::span<const StateBlock> blocks,
                                 Remote remote) const {
  if (!remote.any()) return kNoRangeLimit;
  std::int64_t states = 0;
  for (const StateBlock& block : blocks) states += block.bits;
  const std::int64_t gradient = remote.gradient ? 32 : 0;
  const std::int64_t weights = remote.weights ? size_of(unit.layout.dtype()).value * 8 : 0;
  return stage_->share() / (states + gradient + weights) * states;
}

void AdamOptimizer::step(std::span<const GroupScalars> groups, const GradientScale& scale,
                         std::span<const int> first, const Updated& updated) {
  prepare();
  states_.begin_step();
  dealer_.begin_step();
  on_device_ = Numel();
  const Step step{groups, scale};
  const std::vector<int> units = order(first);
  std::vector<Part> parts;
  for (const int unit : units) {
    if (shards_.gradients().filled(unit)) deal(shards_.units()[shards_.index_of(unit)], parts);
  }
  if (stage_ != nullptr) stage_->begin();
  if (host_ != nullptr) {
    began_ = device_.compute_stream().record_timed();
    const float known = scale.value;
    host_->begin(scale.on_host ? scale.on_host : [known] { return known; });
  }
  // The host's parts are queued ahead of the device's, whose copies fill the driver's queues.
  auto next = parts.begin();                            // of those that the host may get
  std::map<int, std::unique_ptr<device::Event>> ended;  // by unit, of those that peers wait for
  const auto queue_on_host = [&](std::vector<Part>::iterator until) {
    for (; next < until; ++next) {
      if (!next->on_host) continue;
      update_on_host(*next, step);
      if (!first.empty()) ended[next->shard.unit] = host_->ended();
    }
  };
  auto part = parts.begin();
  for (const int unit : units) {
    for (; part != parts.end() && part->shard.unit == unit; ++part) {
      while (host_ != nullptr && next < parts.end() && host_->pending() < kQueued)
        queue_on_host(next + 1);
      if (!part->on_host) update_on_device(*part, step);
    }
    if (shards_.gradients().filled(unit))
      round_wide_weights(shards_.units()[shards_.index_of(unit)]);
    if (!first.empty()) {  // peers gather those of `first` while the others are updated
      queue_on_host(part);
      if (stage_ != nullptr) stage_->join();
      if (ended.contains(unit)) device_.compute_stream().wait_for(*ended[unit]);
    }
    updated(unit);
  }
  queue_on_host(parts.end());
  if (stage_ != nullptr) stage_->join();
  if (host_ != nullptr) {
    ended_ = device_.compute_stream().record_timed();
    host_->join();
  }
  store_.advance();  // writes what was updated last
}

// In parts that begin where those of other steps do, so that lanes share no page.
void AdamOptimizer::deal(const OptimizerShards::UnitShard& shard, std::vector<Part>& parts) {
  const std::vector<AdamStates::Run> runs = states_.runs_of(shard);
  if (runs.empty()) return;
  const Numel last = runs.back().end;
  const bool both = host_ != nullptr && host_can_update(nth(shards_.weights().units(), shard.unit));
  for (Numel begin = runs.front().begin; begin < last;) {
    const Numel cut((begin / lanes_.part + 1) * lanes_.part.value);
    const Numel end = both ? std::min(cut, last) : last;
    parts.push_back({shard, begin, end, both && dealer_.to_host(end - begin)});
    if (both && !parts.back().on_host) on_device_ += end - begin;
    begin = end;
  }
}

void AdamOptimizer::throw_failure(bool waits) {
  if (host_ == nullptr) return;
  host_->throw_failure(waits);
  if (!waits || ended_ == nullptr || !ended_->done()) return;
  dealer_.learn(host_->time(), {on_device_, ended_->seconds_since(*began_)});
  ended_.reset();
}

// The kernel writes 16-bit weights beside their masters, but no fp64 ones.
void AdamOptimizer::round_wide_weights(const OptimizerShards::UnitShard& shard) {
  Weights& weights = shards_.weights();
  const Unit& unit = nth(weights.units(), shard.unit);
  if (unit.layout.dtype() != DType::kFloat64) return;
  if (stage_ != nullptr) stage_->join();
  for (const AdamStates::Run& run : states_.runs_of(shard))
    weights.masters().round(shard.unit, run.begin, run.end);
}

void AdamOptimizer::update_on_host(const Part& part, const Step& step) {
  const Unit& unit = unit_of(part);
  const std::vector<AdamStates::Run> all_runs = states_.runs_of(part.shard);
  const GradientShards::Resting gradient = shards_.gradients().resting(unit.id);
  const auto update_range = [&](const StateRange& range) {
    const auto update_piece = [&](const WeightShards::Piece& piece) {
      std::vector<offload::Lease*> leases = {piece.lease};
      for (const auto& lease : range.leases) leases.push_back(lease.get());
      std::vector<HostLane::Run> runs;
      states_.for_each_run(
          unit, all_runs,
          {range, piece, gradient.values.data() + bytes_of(piece.begin, gradient.dtype).size(),
           gradient.dtype},
          step.groups, [&](const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars) {
            runs.push_back({spans, scalars});
          });
      host_->update(std::move(runs), leases);
    };
    shards_.weights().shards().for_each(unit.id, range.low, range.high, offload::Access::kReadWrite,
                                        update_piece);
  };
  for_each_range(store_, states_.blocks(unit.id), unit.layout.shard(), part.begin, part.end,
                 offload::Access::kReadWrite, update_range);
}

void AdamOptimizer::update_on_device(const Part& part, const Step& step) {
  const Unit& unit = unit_of(part);
  const std::vector<AdamStates::Run> runs = states_.runs_of(part.shard);
  const std::vector<StateBlock> blocks = states_.blocks(unit.id);
  const Remote remote = stage_ != nullptr ? remote_of(unit) : Remote();
  GradientShards& gradients = shards_.gradients();
  const GradientShards::Resting gradient =
      remote.gradient ? gradients.resting(unit.id)
                      : GradientShards::Resting{std::as_bytes(gradients.values(unit.id))};
  const bool adopts = unit.whole && unit.layout.dtype() == DType::kFloat64;
  device::Stream& stream = device_.compute_stream();
  const auto update_range = [&](const StateRange& range) {
    std::vector<std::unique_ptr<offload::Lease>> copies;
    StateRange near = range;
    if (remote.states) {
      for (const auto& lease : range.leases)
        copies.push_back(stage_->bring(*lease, lease->bytes(), offload::Access::kReadWrite));
      near.leases = copies;
    }
    const Numel numel = range.high - range.low;
    std::span<const std::byte> of_range = gradient.values.subspan(
        bytes_of(range.low, gradient.dtype).size(), bytes_of(numel, gradient.dtype).size());
    const auto gradient_copy = remote.gradient ? stage_->bring(of_range) : nullptr;
    if (gradient_copy != nullptr) of_range = gradient_copy->bytes();
    if (gradient.dtype != DType::kFloat32) {
      const Bytes wide = bytes_of(numel, DType::kFloat32);
      device_.cast(widened_->bytes().data(), DType::kFloat32, of_range.data(), gradient.dtype,
                   numel, stream);
      of_range = widened_->bytes().first(wide.size());
    }
    const auto update_piece = [&](const WeightShards::Piece& piece) {
      WeightShards::Piece here = piece;
      const auto weight_copy =
          remote.weights ? stage_->bring(*piece.lease, piece.bytes, offload::Access::kReadWrite)
                         : nullptr;
      if (weight_copy != nullptr) here.bytes = weight_copy->bytes();
      if (adopts) {
        auto* const masters = reinterpret_cast<float*>(near.bytes(0).data());
        device_.adopt_written(
            {masters + (piece.begin - range.first).size(), (piece.end - piece.begin).size()},
            here.bytes.data(), unit.layout.dtype(), stream);
      }
      const std::size_t from = bytes_of(piece.begin - range.low, DType::kFloat32).size();
      states_.for_each_run(unit, runs, {near, here, of_range.data() + from}, step.groups,
                           [&](const kernels::AdamSpans& spans, kernels::AdamScalars scalars) {
                             scalars.gradient_scale = step.scale.value;
                             scalars.late_scale = step.scale.late;
                             device_.adam_step(spans, scalars, stream);
                           });
    };
    shards_.weights().shards().for_each(unit.id, range.low, range.high, offload::Access::kReadWrite,
                                        update_piece);
  };
  for_each_range(store_, blocks, unit.layout.shard(), part.begin, part.end,
                 offload::Access::kReadWrite, update_range, range_limit(unit, blocks, remote));
}

}  // namespace strata::engine
