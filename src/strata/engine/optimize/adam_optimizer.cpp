#include "strata/engine/optimize/adam_optimizer.h"

#include "strata/base/error.h"

namespace strata::engine {
namespace {

std::span<float> floats(offload::Lease& lease) {
  return {reinterpret_cast<float*>(lease.bytes().data()), lease.bytes().size() / sizeof(float)};
}

}  // namespace

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
      blocks.push_back({unit.name() + state, bytes, memory::Kind::kOptimizerState});
  }
  const std::vector<offload::BlockId> added = store_.add_all(std::move(blocks));
  for (std::size_t i = 0; i < added.size(); i += 2) states_.push_back({added[i], added[i + 1]});
}

DType AdamOptimizer::moment_dtype(int unit) const {
  return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? moments_
                                                                           : DType::kFloat32;
}

std::unique_ptr<offload::Lease> AdamOptimizer::lease_moment(int unit, Moment moment) {
  if (states_.empty()) return nullptr;
  const States& states = states_[shards_.index_of(unit)];
  return store_.fetch(moment == Moment::kFirst ? states.exp_avg : states.exp_avg_sq,
                      offload::Access::kReadWrite);
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
      update(shards_.units()[i], states_[i], groups, scale);
      round_wide_weights(shards_.units()[i]);
    }
    updated(unit);
  }
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
  for (const Run& run : runs_of(shard)) weights.round_masters(shard.unit, run.begin, run.end);
}

void AdamOptimizer::update(const OptimizerShards::UnitShard& shard, const States& states,
                           std::span<const GroupScalars> groups, const GradientScale& scale) {
  Weights& weights = shards_.weights();
  const Unit& unit = weights.units()[static_cast<std::size_t>(shard.unit)];
  const auto master = weights.lease_master(shard.unit);
  const auto exp_avg = store_.fetch(states.exp_avg, offload::Access::kReadWrite);
  const auto exp_avg_sq = store_.fetch(states.exp_avg_sq, offload::Access::kReadWrite);
  const std::span<const float> gradient = shards_.gradients().values(shard.unit);
  const plan::MasterForm form = weights.master_form(shard.unit);
  const DType moments = moment_dtype(shard.unit);
  for (const Run& run : runs_of(shard)) {
    STRATA_ASSERT(static_cast<std::size_t>(run.group) < groups.size());
    const GroupScalars& group = groups[static_cast<std::size_t>(run.group)];
    const std::size_t begin = run.begin.size();
    const std::size_t numel = (run.end - run.begin).size();
    kernels::AdamSpans spans;
    if (form == plan::MasterForm::kRounded) {
      spans.rounds_weight16 = true;
    } else if (form == plan::MasterForm::kRemainder) {
      // Runs begin where parameters do, at multiples of 256 bytes.
      spans.remainder = kernels::remainder_over(master->bytes(), unit.layout.shard()).from(begin);
    } else {
      spans.weight = floats(*master).subspan(begin, numel);
    }
    if (moments == DType::kBFloat16) {
      const std::size_t at = bytes_of(run.begin, moments).size();
      spans.moments16 = {exp_avg->bytes().data() + at, exp_avg_sq->bytes().data() + at};
    } else {
      spans.exp_avg = floats(*exp_avg).subspan(begin, numel);
      spans.exp_avg_sq = floats(*exp_avg_sq).subspan(begin, numel);
    }
    spans.gradient = gradient.subspan(begin, numel);
    if (size_of(unit.layout.dtype()) == 2_B) {
      spans.weight16 = unit.shard.data() + bytes_of(run.begin, unit.layout.dtype()).size();
      spans.weight16_dtype = unit.layout.dtype();
    }
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
}

}  // namespace strata::engine
