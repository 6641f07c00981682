// The engine's own rules of update over this rank's shards: one pass for each run of parameters
// whose update has the same scalars; it also writes the 16-bit weight. States are in the
// StateStore. On a device that runs ahead, values that rest in host memory are updated in two
// lanes, each in a stream: by the device, over the link, and by the host (host_lane.h). As in
// torch, each parameter counts the steps in which it took part. MuonUpdate updates matrices.
// Threads: one thread at a time. Errors: those of the StateStore; a step that fails half-way leaves
// later units at their old values, so the caller must not go on. throw_failure() throws those of
// the host's lane.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/host_lane.h"
#include "strata/engine/optimize/muon_update.h"
#include "strata/engine/optimize/native_states.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/engine/optimize/state_cache.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class NativeOptimizer final : public ShardedOptimizer {
 public:
  // `rule`: a native one, of units that have none of their own. `options` has the type of states,
  // fp32 or bf16, in units whose masters are rounded; others have fp32 states. The optimizer
  // notifies `watch` of its copies.
  NativeOptimizer(OptimizerShards& shards, device::Device& device, offload::StateStore& states,
                  UpdateRule rule, const EngineOptions& options, offload::LinkWatch& watch);
  ~NativeOptimizer() override;
  void set_muon(std::unique_ptr<MuonUpdate> muon) { muon_ = std::move(muon); }  // before all else
  MuonUpdate* muon() { return muon_.get(); }  // null: no unit has the rule kMuon

  void prepare() override {
    if (states_.prepared()) return;
    states_.prepare();
    if (muon_ != nullptr) muon_->prepare();
    make_lanes();
  }
  void add(int unit, bool is_new) override;
  std::vector<int> order(std::span<const int> first) const override { return shards_.order(first); }
  void step(std::span<const GroupScalars> groups, const GradientScale& scale,
            std::span<const int> first, const Updated& updated) override;
  bool update_early(int unit, std::span<const GroupScalars> groups) override;
  void forget_early() override;
  void throw_failure(bool waits) override;
  std::optional<LaneTimes> lane_times() const override { return times_; }
  Bytes cached() const override { return cache_.bytes(); }
  bool give_back_memory() override { return cache_.give_back(); }
  device::Stream& stream() override {
    return update_ != nullptr ? *update_ : device_.compute_stream();
  }
  // Not with fp64 weights, which a pass rounds that knows no scale, and not with Muon.
  bool takes_late_scale() const override { return !has_wide_weights_ && muon_ == nullptr; }
  void forget_step() override { states_.forget_step(); }
  std::int64_t steps() const override { return states_.steps(); }
  void offload_states(bool /*masters*/) override { drop_lanes(); }
  void reload_states() override {
    if (states_.prepared() && update_ == nullptr) make_lanes();
  }
  // For checkpoints. Writing states counts.
  NativeStates& states() { return states_; }
  const NativeStates& states() const { return states_; }

 private:
  // The parts of a unit that kernels of the device reach over the link.
  struct Far {
    bool states = false;
    bool gradient = false;
    bool weights = false;
    bool any() const { return states || gradient || weights; }
  };
  Far far_of(const Unit& unit) const;
  bool host_can_update(const Unit& unit) const;
  bool is_muon(int unit) const { return states_.rule(unit) == UpdateRule::kMuon; }
  void begin_step();
  void make_lanes();
  void drop_lanes();
  // Elements of a unit that one lane updates in a step.
  struct Part {
    const OptimizerShards::UnitShard& shard;
    Numel begin;
    Numel end;
    bool on_host = false;
  };
  std::vector<Part> deal(const OptimizerShards::UnitShard& shard);
  void update(const Part& part, std::span<const GroupScalars> groups, const GradientScale& scale);
  GradientShards::Resting gradient_of(const Unit& unit, bool on_host);
  using Events = std::vector<std::shared_ptr<device::Event>>;
  Events ended();
  void round_wide_weights(const OptimizerShards::UnitShard& shard);

  OptimizerShards& shards_;
  device::Device& device_;
  offload::StateStore& store_;
  offload::LinkWatch& watch_;
  UpdateLanes lanes_;
  NativeStates states_;
  StateCache cache_;
  std::unique_ptr<MuonUpdate> muon_;
  bool has_wide_weights_ = false;
  std::unique_ptr<device::Stream> update_;  // the device's lane; null: the compute stream
  std::unique_ptr<HostLane> host_;          // null: there is nothing for it
  LaneDealer dealer_;
  std::map<int, Events> early_;  // units that update_early() has updated for the next step()
  Numel on_device_;              // elements of the last step that the device's lane updated
  std::unique_ptr<device::TimedEvent> began_;
  std::unique_ptr<device::TimedEvent> ended_;
  std::optional<LaneTimes> times_;
};

}  // namespace strata::engine
