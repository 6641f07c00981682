// The states of Adam for this rank's shards, and the arithmetic of an update of some elements: the
// steps that count for each parameter, and the spans and scalars for the kernels, which are the
// same for the device's and for the host's. Threads: one thread at a time. Ownership: borrows the
// shards and the store. Errors: those of StateStore::add_all().
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// The names of its states.
inline constexpr std::string_view kExpAvg = "exp_avg";
inline constexpr std::string_view kExpAvgSq = "exp_avg_sq";

class AdamStates {
 public:
  AdamStates(OptimizerShards& shards, offload::StateStore& store, bool decoupled, DType moments);

  bool prepared() const { return !states_.empty(); }
  void prepare() {
    if (!prepared()) add(shards_.units());
  }
  void add(std::span<const OptimizerShards::UnitShard> shards);

  // Counts a step for all parameters, and then not for those that GradientShards leave out.
  void count_step();
  void leave_out();
  void forget_step();
  // A parameter that has taken part in no step.
  void add_param(int param) { nth(missed_, param) = steps_; }
  std::int64_t steps() const { return steps_; }
  std::int64_t steps_of(int param) const { return steps_ - nth(missed_, param); }
  void set_steps(std::int64_t all, std::span<const std::int64_t> by_param);

  DType moment_dtype(int unit) const {
    return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? moments_
                                                                             : DType::kFloat32;
  }
  StateBlock moment_block(int unit, std::string_view state) const;
  // The blocks of a unit: those of its masters, and the moments.
  std::vector<StateBlock> blocks(int unit) const;
  Bytes bytes_of_unit(const Unit& unit) const;

  // Elements [begin, end) of a shard whose update has the same scalars.
  struct Run {
    int group = 0;
    std::int64_t step = 0;  // counted from 1
    Numel begin;
    Numel end;
  };
  std::vector<Run> runs_of(const OptimizerShards::UnitShard& shard) const;

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
                    std::span<const GroupScalars> groups, const Update& update) const;

 private:
  struct States {
    offload::BlockId exp_avg = -1;
    offload::BlockId exp_avg_sq = -1;
  };
  kernels::AdamSpans spans_of(const Unit& unit, const Values& values, Numel begin, Numel end) const;

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
