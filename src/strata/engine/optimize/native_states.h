// The states of the engine's own rules for this rank's shards, by name, and the arithmetic of an
// update of some elements: the steps that count for each parameter, and the spans and scalars for
// the kernels, which are the same for the device's and for the host's. Threads: one thread at a
// time. Ownership: borrows the shards and the store. Errors: those of StateStore::add_all().
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/state_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

using plan::kExpAvg;
using plan::kExpAvgSq;

class NativeStates {
 public:
  // `rule`: of units that have none of their own.
  NativeStates(OptimizerShards& shards, offload::StateStore& store, UpdateRule rule,
               const EngineOptions& options)
      : shards_(shards),
        store_(store),
        rule_(rule),
        numbers_(options.moment_dtype),
        keeps_positive_(options.keeps_positive),
        missed_(static_cast<std::size_t>(shards.weights().param_count())) {}

  bool prepared() const { return !states_.empty(); }
  void prepare() {
    if (!prepared()) add(shards_.units());
  }
  void add(std::span<const OptimizerShards::UnitShard> shards) {
    std::vector<offload::BlockSpec> blocks;
    for (const OptimizerShards::UnitShard& shard : shards) {
      const Unit& unit = nth(shards_.weights().units(), shard.unit);
      const auto add_block = [&](std::string_view state, const char* suffix, Bytes bytes) {
        blocks.push_back({fmt::format("{}.{}{}", unit.name(), state, suffix), bytes,
                          memory::Kind::kOptimizerState, unit.spec.place.states});
      };
      for (const std::string_view state : names(shard.unit)) {
        add_block(state, "", bytes_of(unit.layout.shard(), dtype(shard.unit)));
        if (in_8_bits(shard.unit))
          add_block(state, plan::kScales.data(),
                    StateBlock{-1, 32, plan::kBlock8}.bytes_of(unit.layout.shard()));
      }
    }
    const std::vector<offload::BlockId> added = store_.add_all(std::move(blocks));
    auto next = added.begin();
    for (const OptimizerShards::UnitShard& shard : shards) {
      const auto end = next + std::ssize(names(shard.unit)) * (in_8_bits(shard.unit) ? 2 : 1);
      states_.emplace_back(next, end);
      next = end;
    }
  }

  // Counts a step for all parameters, and then not for those that GradientShards leave out.
  void count_step() {
    ++steps_;
    shards_.weights().masters().note_update();
  }
  void leave_out() {
    left_out_ = shards_.gradients().left_out();
    for (const int param : left_out_) ++nth(missed_, param);
  }
  void forget_step() {
    --steps_;
    for (const int param : left_out_) --nth(missed_, param);
    left_out_.clear();
  }
  // A parameter that has taken part in no step.
  void add_param(int param) { nth(missed_, param) = steps_; }
  std::int64_t steps() const { return steps_; }
  std::int64_t steps_of(int param) const { return steps_ - nth(missed_, param); }
  void set_steps(std::int64_t all, std::span<const std::int64_t> by_param) {
    STRATA_ASSERT(by_param.size() == missed_.size());
    steps_ = all;
    left_out_.clear();
    for (std::size_t p = 0; p < by_param.size(); ++p) missed_[p] = all - by_param[p];
  }

  UpdateRule rule(int unit) const {
    return plan::rule_of(nth(shards_.weights().units(), unit).spec.rule, rule_);
  }
  // The states of a unit's elements, and the dtype in which they are kept: kUInt8 where they are
  // codes, with scales beside them.
  std::span<const std::string_view> names(int unit) const { return plan::states_of(rule(unit)); }
  bool in_8_bits(int unit) const {
    return nth(shards_.weights().units(), unit).spec.states == plan::StateForm::k8Bit;
  }
  DType dtype(int unit) const { return in_8_bits(unit) ? DType::kUInt8 : number_dtype(unit); }
  // `state`: one of names().
  StateBlock block(int unit, std::string_view state) const {
    return {block_id(unit, state, 0), static_cast<int>(size_of(dtype(unit)).value * 8)};
  }
  // The scales of a state in 8 bits.
  StateBlock scales(int unit, std::string_view state) const {
    STRATA_ASSERT(in_8_bits(unit));
    return {block_id(unit, state, 1), 32, plan::kBlock8};
  }
  // The blocks of a unit: those of its masters, and the states in the order of names(), each before
  // its scales.
  std::vector<StateBlock> blocks(int unit) const {
    std::vector<StateBlock> blocks = shards_.weights().masters().blocks(unit);
    for (const std::string_view state : names(unit)) {
      blocks.push_back(block(unit, state));
      if (in_8_bits(unit)) blocks.push_back(scales(unit, state));
    }
    return blocks;
  }
  // The bytes of one of its states.
  Bytes bytes_of_state(const Unit& unit) const {
    return plan::state_bytes(unit.spec.states, number_dtype(unit.id), unit.layout.shard());
  }
  // Masters are counted by plan: units whose values come from files have no memory for them yet.
  Bytes bytes_of_unit(const Unit& unit) const {
    const Numel numel = unit.layout.shard();
    return bytes_of_state(unit) * std::ssize(names(unit.id)) +
           plan::master_bytes(shards_.weights().master_form(unit.id), numel);
  }

  // Elements [begin, end) of a shard whose update has the same scalars.
  struct Run {
    int group = 0;
    std::int64_t step = 0;  // counted from 1
    Numel begin;
    Numel end;
  };
  std::vector<Run> runs_of(const OptimizerShards::UnitShard& shard) const {
    std::vector<Run> runs;
    for (const plan::ParamSegment& segment : shard.segments) {
      if (shards_.gradients().left_out(segment.param)) continue;
      const std::int64_t step = steps_of(segment.param);
      if (!runs.empty() && runs.back().end == segment.begin && runs.back().group == segment.group &&
          runs.back().step == step) {
        runs.back().end = segment.end;
      } else {
        runs.push_back({segment.group, step, segment.begin, segment.end});
      }
    }
    return runs;
  }

  // The values of a piece of weights: its states are in `range`, over blocks(), and `gradient`
  // begins with the gradient of the piece's first element.
  struct Values {
    const StateRange& range;
    const WeightShards::Piece& piece;
    const std::byte* gradient = nullptr;
    DType gradient_dtype = DType::kFloat32;
  };
  using Update = std::function<void(const kernels::UpdateSpans&, const kernels::UpdateScalars&)>;
  // Calls `update` for each run of the piece. The scalars have no gradient_scale.
  void for_each_run(const Unit& unit, std::span<const Run> runs, const Values& values,
                    std::span<const GroupScalars> groups, const Update& update) const {
    const WeightShards::Piece& piece = values.piece;
    const UpdateRule of_unit = rule(unit.id);
    for (const Run& run : runs) {
      const Numel begin = std::max(run.begin, piece.begin);
      const Numel end = std::min(run.end, piece.end);
      if (begin >= end) continue;
      STRATA_ASSERT(static_cast<std::size_t>(run.group) < groups.size());
      kernels::UpdateScalars scalars = nth(groups, run.group);
      scalars.decoupled = of_unit != UpdateRule::kAdam;
      if (of_unit == UpdateRule::kLion) scalars.formula = kernels::Formula::kLion;
      scalars.keeps_positive = keeps_positive_;
      scalars.step = run.step;
      update(spans_of(unit, values, begin, end), scalars);
    }
  }

  // The weights of elements [begin, end) of the shard, in the piece, and their masters in the
  // range, over blocks that begin with those of the masters.
  kernels::UpdateSpans weight_spans(const Unit& unit, const StateRange& range,
                                    const WeightShards::Piece& piece, Numel begin,
                                    Numel end) const {
    const std::size_t numel = (end - begin).size();
    const std::size_t at = (begin - range.first).size();
    std::byte* const weight =
        piece.bytes.data() + bytes_of(begin - piece.begin, unit.layout.dtype()).size();
    const plan::MasterForm form = shards_.weights().master_form(unit.id);
    kernels::UpdateSpans spans;
    if (form == plan::MasterForm::kRounded) spans.rounds_weight16 = true;
    // Runs begin where parameters do, at multiples of 256 bytes, and ranges at multiples of 8.
    if (form == plan::MasterForm::kRemainder)
      spans.remainder = MasterStates::remainder_in(range).from(at);
    if (form == plan::MasterForm::kFloat32) spans.weight = floats_in(range, 0, at, numel);
    if (form == plan::MasterForm::kShard) spans.weight = {reinterpret_cast<float*>(weight), numel};
    if (size_of(unit.layout.dtype()) == 2_B) {
      spans.weight16 = weight;
      spans.weight16_dtype = unit.layout.dtype();
      // A script can write weights that are whole. Others may be leased without their values.
      spans.follows_weight16 = unit.whole && form == plan::MasterForm::kFloat32;
    }
    return spans;
  }

 private:
  // The dtype of states that are not in 8 bits.
  DType number_dtype(int unit) const {
    return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? numbers_
                                                                             : DType::kFloat32;
  }
  offload::BlockId block_id(int unit, std::string_view state, std::size_t which) const {
    STRATA_ASSERT(prepared());
    const auto all = names(unit);
    const auto index = static_cast<std::size_t>(std::ranges::find(all, state) - all.begin());
    STRATA_ASSERT(index < all.size());
    return states_[shards_.index_of(unit)][index * (in_8_bits(unit) ? 2 : 1) + which];
  }
  // The same, with states and gradient.
  kernels::UpdateSpans spans_of(const Unit& unit, const Values& values, Numel begin,
                                Numel end) const {
    const StateRange& range = values.range;
    const std::size_t numel = (end - begin).size();
    const std::size_t at = (begin - range.first).size();
    kernels::UpdateSpans spans = weight_spans(unit, range, values.piece, begin, end);
    const std::byte* const gradient =
        values.gradient + bytes_of(begin - values.piece.begin, values.gradient_dtype).size();
    if (values.gradient_dtype == DType::kFloat32)
      spans.gradient = {reinterpret_cast<const float*>(gradient), numel};
    else
      spans.gradient16 = {gradient, values.gradient_dtype, numel};
    const std::size_t states = names(unit.id).size();  // they come last
    const std::size_t first = range.leases.size() - states * (in_8_bits(unit.id) ? 2 : 1);
    if (in_8_bits(unit.id)) {
      STRATA_ASSERT(at % plan::kBlock8 == 0);
      const auto state8 = [&](std::size_t block) {
        return kernels::Codes8{reinterpret_cast<std::uint8_t*>(range.bytes(block).data()),
                               reinterpret_cast<float*>(range.bytes(block + 1).data())}
            .from(at);
      };
      spans.states8.exp_avg = state8(first);
      if (states > 1) spans.states8.exp_avg_sq = state8(first + 2);
    } else if (dtype(unit.id) == DType::kBFloat16) {
      const std::size_t bytes = bytes_of(Numel(at), DType::kBFloat16).size();
      spans.moments16.exp_avg = range.bytes(first).data() + bytes;
      if (states > 1) spans.moments16.exp_avg_sq = range.bytes(first + 1).data() + bytes;
    } else {
      spans.exp_avg = floats_in(range, first, at, numel);
      if (states > 1) spans.exp_avg_sq = floats_in(range, first + 1, at, numel);
    }
    return spans;
  }
  static std::span<float> floats_in(const StateRange& range, std::size_t block, std::size_t at,
                                    std::size_t numel) {
    return {reinterpret_cast<float*>(range.bytes(block).data()) + at, numel};
  }

  OptimizerShards& shards_;
  offload::StateStore& store_;
  UpdateRule rule_;
  DType numbers_;  // of states where masters are rounded
  bool keeps_positive_;
  std::int64_t steps_ = 0;
  std::vector<std::int64_t> missed_;  // by parameter: steps that left it out
  std::vector<int> left_out_;         // parameters, of the last step
  // By index into shards_.units(), in the order of blocks().
  std::vector<std::vector<offload::BlockId>> states_;
};

}  // namespace strata::engine
