#include "strata/engine/optimize/adam_optimizer.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

AdamOptimizer::AdamOptimizer(OptimizerShards& shards, device::Device& device,
                             offload::StateStore& states, bool decoupled, offload::LinkWatch& watch,
                             DType moments)
    : shards_(shards),
      device_(device),
      store_(states),
      watch_(watch),
      decoupled_(decoupled),
      moments_(moments),
      missed_(static_cast<std::size_t>(shards.weights().param_count())) {
  for (const OptimizerShards::UnitShard& shard : shards.units()) {
    const Unit& unit = nth(shards.weights().units(), shard.unit);
    if (unit.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  }
}

void AdamOptimizer::add_states(std::span<const OptimizerShards::UnitShard> shards) {
  std::vector<offload::BlockSpec> blocks;
  for (const OptimizerShards::UnitShard& shard : shards) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    const Bytes bytes = bytes_of(unit.layout.shard(), moment_dtype(shard.unit));
    for (const char* const state : {".exp_avg", ".exp_avg_sq"})
      blocks.push_back(
          {unit.name() + state, bytes, memory::Kind::kOptimizerState, unit.spec.place.states});
  }
  const std::vector<offload::BlockId> added = store_.add_all(std::move(blocks));
  for (std::size_t i = 0; i < added.size(); i += 2) states_.push_back({added[i], added[i + 1]});
}

void AdamOptimizer::add(int unit, bool is_new) {
  if (!is_new) return;  // its states are there, and each step has left its parameter out
  const Unit& of = nth(shards_.weights().units(), unit);
  if (of.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  for (const int param : of.spec.params) nth(missed_, param) = steps_;
  if (prepared()) add_states({&shards_.units()[shards_.index_of(unit)], 1});
  if (stage_ == nullptr) return;
  device_.compute_stream().synchronize();
  stage_.reset();
  make_stage();
}

AdamOptimizer::Remote AdamOptimizer::remote_of(const Unit& unit) const {
  const GradientShards& gradients = shards_.gradients();
  return {.states = unit.spec.place.states.value_or(store_.tier()) != memory::Tier::kDevice,
          .gradient = gradients.on_host(unit.id) && gradients.dtype() == DType::kFloat32,
          .weights = unit.offloaded};
}

// A device that does not run ahead works on the host's memory as on its own.
void AdamOptimizer::make_stage() {
  if (!device_.runs_ahead()) return;
  Bytes largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    const Remote remote = remote_of(unit);
    Bytes bytes;
    if (remote.states) {
      const States& states = states_[shards_.index_of(unit.id)];
      bytes += store_.size_of(states.exp_avg) + store_.size_of(states.exp_avg_sq);
      // Not those of the store: units whose values come from files have no memory yet.
      bytes += plan::master_bytes(shards_.weights().master_form(unit.id), unit.layout.shard());
    }
    if (remote.gradient) bytes += bytes_of(unit.layout.shard(), DType::kFloat32);
    if (remote.weights) bytes += unit.layout.shard_bytes();
    largest = std::max(largest, bytes);
  }
  if (largest > Bytes()) stage_ = std::make_unique<offload::DeviceStage>(device_, largest, watch_);
}

// The states' part of what the stage has room for, beside gradient and weights.
Bytes AdamOptimizer::range_limit(const Unit& unit, std::span<const StateBlock> blocks) const {
  const Remote remote = remote_of(unit);
  if (stage_ == nullptr || !remote.any()) return kNoRangeLimit;
  std::int64_t states = 0;
  for (const StateBlock& block : blocks) states += block.bits;
  const std::int64_t gradient = remote.gradient ? 32 : 0;
  const std::int64_t weights = remote.weights ? size_of(unit.layout.dtype()).value * 8 : 0;
  return stage_->share() / (states + gradient + weights) * states;
}

StateBlock AdamOptimizer::moment_block(int unit, std::string_view state) const {
  STRATA_ASSERT(prepared());
  const States& states = states_[shards_.index_of(unit)];
  const auto bits = static_cast<int>(size_of(moment_dtype(unit)).value * 8);
  return {state == kExpAvg ? states.exp_avg : states.exp_avg_sq, bits};
}

void AdamOptimizer::set_steps(std::int64_t all, std::span<const std::int64_t> by_param) {
  STRATA_ASSERT(by_param.size() == missed_.size());
  steps_ = all;
  left_out_.clear();
  for (std::size_t p = 0; p < by_param.size(); ++p) missed_[p] = all - by_param[p];
}

void AdamOptimizer::step(std::span<const GroupScalars> groups, const GradientScale& scale,
                         std::span<const int> first, const Updated& updated) {
  prepare();
  ++steps_;
  left_out_ = shards_.gradients().left_out();
  for (const int param : left_out_) ++nth(missed_, param);
  for (const int unit : order(first)) {
    const std::size_t i = shards_.index_of(unit);
    if (shards_.gradients().filled(unit)) {
      update(shards_.units()[i], groups, scale);
      round_wide_weights(shards_.units()[i]);
    }
    updated(unit);
  }
  if (stage_ != nullptr) stage_->join();
  store_.advance();  // writes what was updated last
}

std::vector<AdamOptimizer::Run> AdamOptimizer::runs_of(
    const OptimizerShards::UnitShard& shard) const {
  std::vector<Run> runs;
  for (const plan::ParamSegment& segment : shard.segments) {
    if (shards_.gradients().left_out(segment.param)) continue;
    const std::int64_t step = steps_ - nth(missed_, segment.param);
    if (!runs.empty() && runs.back().end == segment.begin && runs.back().group == segment.group &&
        runs.back().step == step) {
      runs.back().end = segment.end;
    } else {
      runs.push_back({segment.group, step, segment.begin, segment.end});
    }
  }
  return runs;
}

// The kernel writes 16-bit weights beside their masters, but no fp64 ones.
void AdamOptimizer::round_wide_weights(const OptimizerShards::UnitShard& shard) {
  Weights& weights = shards_.weights();
  const Unit& unit = nth(weights.units(), shard.unit);
  if (unit.layout.dtype() != DType::kFloat64) return;
  if (stage_ != nullptr) stage_->join();
  for (const Run& run : runs_of(shard)) weights.masters().round(shard.unit, run.begin, run.end);
}

void AdamOptimizer::update(const OptimizerShards::UnitShard& shard,
                           std::span<const GroupScalars> groups, const GradientScale& scale) {
  const std::vector<Run> runs = runs_of(shard);
  if (runs.empty()) return;
  Weights& weights = shards_.weights();
  const Unit& unit = nth(weights.units(), shard.unit);
  const std::span<const float> gradient = shards_.gradients().values(shard.unit);
  std::vector<StateBlock> blocks = weights.masters().blocks(shard.unit);
  blocks.push_back(moment_block(shard.unit, kExpAvg));
  blocks.push_back(moment_block(shard.unit, kExpAvgSq));
  const Numel first = runs.front().begin;
  const Numel last = runs.back().end;
  const Remote remote = stage_ != nullptr ? remote_of(unit) : Remote();
  if (remote.any()) stage_->begin();
  const auto update_range = [&](const StateRange& range) {
    std::vector<std::unique_ptr<offload::Lease>> copies;
    StateRange near = range;
    if (remote.states) {
      for (const auto& lease : range.leases)
        copies.push_back(stage_->bring(*lease, lease->bytes(), offload::Access::kReadWrite));
      near.leases = copies;
    }
    std::span<const float> of_range =
        gradient.subspan(range.low.size(), (range.high - range.low).size());
    const auto gradient_copy = remote.gradient ? stage_->bring(std::as_bytes(of_range)) : nullptr;
    if (gradient_copy != nullptr) {
      const auto* const values = reinterpret_cast<const float*>(gradient_copy->bytes().data());
      of_range = {values, of_range.size()};
    }
    const auto update_piece = [&](const WeightShards::Piece& piece) {
      WeightShards::Piece here = piece;
      const auto weight_copy =
          remote.weights ? stage_->bring(*piece.lease, piece.bytes, offload::Access::kReadWrite)
                         : nullptr;
      if (weight_copy != nullptr) here.bytes = weight_copy->bytes();
      update_runs(unit, runs, near, here, of_range.subspan((piece.begin - range.low).size()),
                  groups, scale);
    };
    weights.shards().for_each(unit.id, range.low, range.high, offload::Access::kReadWrite,
                              update_piece);
  };
  for_each_range(store_, blocks, unit.layout.shard(), first, last, offload::Access::kReadWrite,
                 update_range, range_limit(unit, blocks));
  if (remote.weights) stage_->join();  // for who gathers them
}

// Updates the elements of the piece that lie in `runs`. Their states lie in `range`, and `gradient`
// begins with the gradient of the piece's first element.
void AdamOptimizer::update_runs(const Unit& unit, std::span<const Run> runs,
                                const StateRange& range, const WeightShards::Piece& piece,
                                std::span<const float> gradient,
                                std::span<const GroupScalars> groups, const GradientScale& scale) {
  for (const Run& run : runs) {
    const Numel begin = std::max(run.begin, piece.begin);
    const Numel end = std::min(run.end, piece.end);
    if (begin >= end) continue;
    STRATA_ASSERT(static_cast<std::size_t>(run.group) < groups.size());
    const Numel at = begin - piece.begin;
    std::byte* const weight = piece.bytes.data() + bytes_of(at, unit.layout.dtype()).size();
    kernels::AdamSpans spans = spans_of(unit, range, weight, begin, end);
    spans.gradient = gradient.subspan(at.size(), (end - begin).size());
    const bool beside = shards_.weights().master_form(unit.id) == plan::MasterForm::kFloat32;
    if (unit.whole && beside && !spans.follows_weight16)
      device_.adopt_written(spans.weight, weight, unit.layout.dtype(), device_.compute_stream());
    kernels::AdamScalars scalars = nth(groups, run.group);
    scalars.decoupled = decoupled_;
    scalars.step = run.step;
    scalars.gradient_scale = scale.value;
    scalars.late_scale = scale.late;
    device_.adam_step(spans, scalars, device_.compute_stream());
  }
}

// The spans of elements [begin, end) of the shard, without their gradient. The elements lie in
// `range`, and their weights begin at `weight`.
kernels::AdamSpans AdamOptimizer::spans_of(const Unit& unit, const StateRange& range,
                                           std::byte* weight, Numel begin, Numel end) {
  const std::size_t numel = (end - begin).size();
  const std::size_t at = (begin - range.first).size();
  const auto floats = [&](std::size_t block) {
    auto* const values = reinterpret_cast<float*>(range.bytes(block).data());
    return std::span(values + at, numel);
  };
  const plan::MasterForm form = shards_.weights().master_form(unit.id);
  kernels::AdamSpans spans;
  if (form == plan::MasterForm::kRounded) spans.rounds_weight16 = true;
  // Runs begin where parameters do, at multiples of 256 bytes, and ranges at multiples of 8.
  if (form == plan::MasterForm::kRemainder)
    spans.remainder = MasterStates::remainder_in(range).from(at);
  if (form == plan::MasterForm::kFloat32) spans.weight = floats(0);
  if (form == plan::MasterForm::kShard) spans.weight = {reinterpret_cast<float*>(weight), numel};
  const std::size_t first = range.leases.size() - 2;  // moments come last
  if (moment_dtype(unit.id) == DType::kBFloat16) {
    const std::size_t bytes = bytes_of(Numel(at), DType::kBFloat16).size();
    spans.moments16 = {range.bytes(first).data() + bytes, range.bytes(first + 1).data() + bytes};
  } else {
    spans.exp_avg = floats(first);
    spans.exp_avg_sq = floats(first + 1);
  }
  if (size_of(unit.layout.dtype()) == 2_B) {
    spans.weight16 = weight;
    spans.weight16_dtype = unit.layout.dtype();
    // A script can write weights that are whole. Others may be leased without their values.
    spans.follows_weight16 = unit.whole && form == plan::MasterForm::kFloat32;
  }
  return spans;
}

}  // namespace strata::engine
