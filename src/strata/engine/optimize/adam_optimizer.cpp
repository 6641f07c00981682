#include "strata/engine/optimize/adam_optimizer.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {
AdamOptimizer::AdamOptimizer(OptimizerShards& shards, device::Device& device,
                             offload::StateStore& states, bool decoupled, DType moments)
    : shards_(shards),
      device_(device),
      store_(states),
      decoupled_(decoupled),
      moments_(moments),
      missed_(static_cast<std::size_t>(shards.weights().param_count())) {
  for (const OptimizerShards::UnitShard& shard : shards.units()) {
    const Unit& unit = shards.weights().units()[static_cast<std::size_t>(shard.unit)];
    if (unit.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  }
}

void AdamOptimizer::prepare() {
  if (!states_.empty()) return;
  std::vector<offload::BlockSpec> blocks;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = shards_.weights().units()[static_cast<std::size_t>(shard.unit)];
    const Bytes bytes = bytes_of(unit.layout.shard(), moment_dtype(shard.unit));
    for (const char* const state : {".exp_avg", ".exp_avg_sq"})
      blocks.push_back(
          {unit.name() + state, bytes, memory::Kind::kOptimizerState, unit.spec.place.states});
  }
  const std::vector<offload::BlockId> added = store_.add_all(std::move(blocks));
  for (std::size_t i = 0; i < added.size(); i += 2) states_.push_back({added[i], added[i + 1]});
}

DType AdamOptimizer::moment_dtype(int unit) const {
  return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? moments_
                                                                           : DType::kFloat32;
}

StateBlock AdamOptimizer::moment_block(int unit, Moment moment) const {
  STRATA_ASSERT(prepared());
  const States& states = states_[shards_.index_of(unit)];
  const auto bits = static_cast<int>(size_of(moment_dtype(unit)).value * 8);
  return {moment == Moment::kFirst ? states.exp_avg : states.exp_avg_sq, bits};
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
  for (const int param : left_out_) ++missed_[static_cast<std::size_t>(param)];
  for (const int unit : order(first)) {
    const std::size_t i = shards_.index_of(unit);
    if (shards_.gradients().filled(unit)) {
      update(shards_.units()[i], groups, scale);
      round_wide_weights(shards_.units()[i]);
    }
    updated(unit);
  }
  store_.advance();  // writes what was updated last
}

void AdamOptimizer::forget_step() {
  --steps_;
  for (const int param : left_out_) --missed_[static_cast<std::size_t>(param)];
  left_out_.clear();
}

std::vector<AdamOptimizer::Run> AdamOptimizer::runs_of(
    const OptimizerShards::UnitShard& shard) const {
  std::vector<Run> runs;
  for (const plan::ParamSegment& segment : shard.segments) {
    if (shards_.gradients().left_out(segment.param)) continue;
    const std::int64_t step = steps_ - missed_[static_cast<std::size_t>(segment.param)];
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
  const Unit& unit = weights.units()[static_cast<std::size_t>(shard.unit)];
  if (unit.layout.dtype() != DType::kFloat64) return;
  for (const Run& run : runs_of(shard)) weights.masters().round(shard.unit, run.begin, run.end);
}

void AdamOptimizer::update(const OptimizerShards::UnitShard& shard,
                           std::span<const GroupScalars> groups, const GradientScale& scale) {
  const std::vector<Run> runs = runs_of(shard);
  if (runs.empty()) return;
  Weights& weights = shards_.weights();
  const Unit& unit = weights.units()[static_cast<std::size_t>(shard.unit)];
  const std::span<const float> gradient = shards_.gradients().values(shard.unit);
  std::vector<StateBlock> blocks = weights.masters().blocks(shard.unit);
  blocks.push_back(moment_block(shard.unit, Moment::kFirst));
  blocks.push_back(moment_block(shard.unit, Moment::kSecond));
  const auto update_piece = [&](const StateRange& range, const WeightShards::Piece& piece) {
    for (const Run& run : runs) {
      const Numel begin = std::max(run.begin, piece.begin);
      const Numel end = std::min(run.end, piece.end);
      if (begin >= end) continue;
      STRATA_ASSERT(static_cast<std::size_t>(run.group) < groups.size());
      const GroupScalars& group = groups[static_cast<std::size_t>(run.group)];
      std::byte* const weight =
          piece.bytes.data() + bytes_of(begin - piece.begin, unit.layout.dtype()).size();
      kernels::AdamSpans spans = spans_of(unit, range, weight, begin, end);
      spans.gradient = gradient.subspan(begin.size(), (end - begin).size());
      kernels::AdamScalars scalars;
      scalars.lr = group.lr;
      scalars.beta1 = group.beta1;
      scalars.beta2 = group.beta2;
      scalars.eps = group.eps;
      scalars.weight_decay = group.weight_decay;
      scalars.decoupled = decoupled_;
      scalars.step = run.step;
      scalars.gradient_scale = scale.value;
      scalars.late_scale = scale.late;
      device_.adam_step(spans, scalars, device_.compute_stream());
    }
  };
  const Numel first = runs.front().begin;
  const Numel last = runs.back().end;
  const auto update_range = [&](const StateRange& range) {
    weights.shards().for_each(unit.id, std::max(first, range.first), std::min(last, range.end),
                              offload::Access::kReadWrite, [&](const WeightShards::Piece& piece) {
                                update_piece(range, piece);
                              });
  };
  for_each_range(store_, blocks, unit.layout.shard(), first, last, offload::Access::kReadWrite,
                 update_range);
}

// Of elements [begin, end) of the shard, which lie in the range, and whose weights begin at
// `weight`; without their gradient.
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
  }
  return spans;
}

}  // namespace strata::engine
