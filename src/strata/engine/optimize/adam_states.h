// The states of Adam for this rank's shards, and the arithmetic of an update of some elements: the
// steps that count for each parameter, and the spans and scalars for the kernels, which are the
// same for the device's and for the host's. Threads: one thread at a time. Ownership: borrows the
// shards and the store. Errors: those of StateStore::add_all().
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/state_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// The names of its states.
inline constexpr std::string_view kExpAvg = "exp_avg";
inline constexpr std::string_view kExpAvgSq = "exp_avg_sq";

class AdamStates {
 public:
  AdamStates(OptimizerShards& shards, offload::StateStore& store, bool decoupled, DType moments)
      : shards_(shards),
        store_(store),
        decoupled_(decoupled),
        moments_(moments),
        missed_(static_cast<std::size_t>(shards.weights().param_count())) {}

  bool prepared() const { return !states_.empty(); }
  void prepare() {
    if (!prepared()) add(shards_.units());
  }
  void add(std::span<const OptimizerShards::UnitShard> shards) {
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

  DType moment_dtype(int unit) const {
    return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? moments_
                                                                             : DType::kFloat32;
  }
  StateBlock moment_block(int unit, std::string_view state) const {
    STRATA_ASSERT(prepared());
    const States& states = states_[shards_.index_of(unit)];
    const auto bits = static_cast<int>(size_of(moment_dtype(unit)).value * 8);
    return {state == kExpAvg ? states.exp_avg : states.exp_avg_sq, bits};
  }
  // The blocks of a unit: those of its masters, and the moments.
  std::vector<StateBlock> blocks(int unit) const {
    std::vector<StateBlock> blocks = shards_.weights().masters().blocks(unit);
    blocks.push_back(moment_block(unit, kExpAvg));
    blocks.push_back(moment_block(unit, kExpAvgSq));
    return blocks;
  }
  // Masters are counted by plan: units whose values come from files have no memory for them yet.
  Bytes bytes_of_unit(const Unit& unit) const {
    const Numel numel = unit.layout.shard();
    return bytes_of(numel, moment_dtype(unit.id)) * 2 +
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
  using Update = std::function<void(const kernels::AdamSpans&, const kernels::AdamScalars&)>;
  // Calls `update` for each run of the piece. The scalars have no gradient_scale.
  void for_each_run(const Unit& unit, std::span<const Run> runs, const Values& values,
                    std::span<const GroupScalars> groups, const Update& update) const {
    const WeightShards::Piece& piece = values.piece;
    for (const Run& run : runs) {
      const Numel begin = std::max(run.begin, piece.begin);
      const Numel end = std::min(run.end, piece.end);
      if (begin >= end) continue;
      STRATA_ASSERT(static_cast<std::size_t>(run.group) < groups.size());
      kernels::AdamScalars scalars = nth(groups, run.group);
      scalars.decoupled = decoupled_;
      scalars.step = run.step;
      update(spans_of(unit, values, begin, end), scalars);
    }
  }

 private:
  struct States {
    offload::BlockId exp_avg = -1;
    offload::BlockId exp_avg_sq = -1;
  };
  // The spans of elements [begin, end) of the shard.
  kernels::AdamSpans spans_of(const Unit& unit, const Values& values, Numel begin,
                              Numel end) const {
    const StateRange& range = values.range;
    const std::size_t numel = (end - begin).size();
    const std::size_t at = (begin - range.first).size();
    const Numel in_piece = begin - values.piece.begin;
    std::byte* const weight =
        values.piece.bytes.data() + bytes_of(in_piece, unit.layout.dtype()).size();
    const auto floats = [&](std::size_t block) {
      auto* const all = reinterpret_cast<float*>(range.bytes(block).data());
      return std::span(all + at, numel);
    };
    const plan::MasterForm form = shards_.weights().master_form(unit.id);
    kernels::AdamSpans spans;
    const std::byte* const gradient =
        values.gradient + bytes_of(in_piece, values.gradient_dtype).size();
    if (values.gradient_dtype == DType::kFloat32)
      spans.gradient = {reinterpret_cast<const float*>(gradient), numel};
    else
      spans.gradient16 = {gradient, values.gradient_dtype, numel};
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

  OptimizerShards& shards_;
  offload::StateStore& store_;
  bool decoupled_;
  DType moments_;
  std::int64_t steps_ = 0;
  std::vector<std::int64_t> missed_;  // by parameter: steps that left it out
  std::vector<int> left_out_;         // parameters, of the last step
  std::vector<States> states_;        // by index into shards_.units()
};

}  // namespace strata::engine
