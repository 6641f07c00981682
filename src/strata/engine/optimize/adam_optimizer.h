// Adam and AdamW over this rank's shards: one pass for each run of parameters whose update has the
// same scalars; it also writes the 16-bit weight. States are in the StateStore. On a device that
// runs ahead, states on the host are copied to the device for their update and back
// (offload/device_stage.h). As in torch, each parameter counts the steps in which it took part.
// Threads: one thread at a time. Errors: those of the StateStore; a step that fails half-way leaves
// later units at their old values, so the caller must not go on.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/device_stage.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// The names of its states.
inline constexpr std::string_view kExpAvg = "exp_avg";
inline constexpr std::string_view kExpAvgSq = "exp_avg_sq";

class AdamOptimizer final : public ShardedOptimizer {
 public:
  // `decoupled`: AdamW; else Adam with L2 added to the gradient. `moments`: the type of moments,
  // fp32 or bf16, in units whose masters are rounded; others have fp32 moments. The optimizer
  // notifies `watch` of its copies.
  AdamOptimizer(OptimizerShards& shards, device::Device& device, offload::StateStore& states,
                bool decoupled, offload::LinkWatch& watch, DType moments = DType::kFloat32);

  void prepare() override {
    if (!states_.empty()) return;
    add_states(shards_.units());
    make_stage();
  }
  void add(int unit, bool is_new) override;
  std::vector<int> order(std::span<const int> first) const override { return shards_.order(first); }
  void step(std::span<const GroupScalars> groups, const GradientScale& scale,
            std::span<const int> first, const Updated& updated) override;
  // Not with fp64 weights, which are rounded from their masters by a pass that knows no scale.
  bool takes_late_scale() const override { return !has_wide_weights_; }
  void forget_step() override {
    --steps_;
    for (const int param : left_out_) --nth(missed_, param);
    left_out_.clear();
  }
  std::int64_t steps() const override { return steps_; }
  void offload_states(bool /*masters*/) override { stage_.reset(); }
  void reload_states() override {
    if (prepared() && stage_ == nullptr) make_stage();
  }

  bool prepared() const { return !states_.empty(); }
  // The steps in which the parameter took part, and the number of all steps: bias correction uses
  // them. For checkpoints.
  std::int64_t steps_of(int param) const { return steps_ - nth(missed_, param); }
  void set_steps(std::int64_t all, std::span<const std::int64_t> by_param);

  DType moment_dtype(int unit) const {
    return shards_.weights().master_form(unit) == plan::MasterForm::kRounded ? moments_
                                                                             : DType::kFloat32;
  }
  // A state of a trainable unit's shard, in moment_dtype(), after prepare(). Writing counts.
  StateBlock moment_block(int unit, std::string_view state) const;

 private:
  struct States {
    offload::BlockId exp_avg = -1;
    offload::BlockId exp_avg_sq = -1;
  };
  // Elements [begin, end) of a shard.
  struct Run {
    int group = 0;
    std::int64_t step = 0;  // counted from 1
    Numel begin;
    Numel end;
  };
  std::vector<Run> runs_of(const OptimizerShards::UnitShard& shard) const;
  void update(const OptimizerShards::UnitShard& shard, std::span<const GroupScalars> groups,
              const GradientScale& scale);
  void update_runs(const Unit& unit, std::span<const Run> runs, const StateRange& range,
                   const WeightShards::Piece& piece, std::span<const float> gradient,
                   std::span<const GroupScalars> groups, const GradientScale& scale);
  kernels::AdamSpans spans_of(const Unit& unit, const StateRange& range, std::byte* weight,
                              Numel begin, Numel end);
  // The parts of a unit that the update would otherwise reach over the link.
  struct Remote {
    bool states = false;
    bool gradient = false;
    bool weights = false;
    bool any() const { return states || gradient || weights; }
  };
  Remote remote_of(const Unit& unit) const;
  void add_states(std::span<const OptimizerShards::UnitShard> shards);
  void make_stage();
  Bytes range_limit(const Unit& unit, std::span<const StateBlock> blocks) const;
  void round_wide_weights(const OptimizerShards::UnitShard& shard);

  OptimizerShards& shards_;
  device::Device& device_;
  offload::StateStore& store_;
  offload::LinkWatch& watch_;
  bool decoupled_;
  DType moments_;
  bool has_wide_weights_ = false;
  std::int64_t steps_ = 0;
  std::vector<std::int64_t> missed_;             // by parameter: steps that left it out
  std::vector<int> left_out_;                    // parameters, of the last step
  std::vector<States> states_;                   // by index into shards_.units()
  std::unique_ptr<offload::DeviceStage> stage_;  // null: everything is where kernels work on it
};

}  // namespace strata::engine
