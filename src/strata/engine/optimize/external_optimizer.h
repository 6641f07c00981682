// A user's optimizer, from torch.optim and the like. It updates the fp32 master shards in place,
// through spans that stay valid until masters are offloaded (offload_states()). The engine then
// rounds the result to the weights. Units whose states rest on the host are updated there: masters
// are leased where they rest, gradients come to the host, and the device's work on both has ended
// when the callback runs. If fp32 weights lie elsewhere, each step copies them anew, with the
// values that scripts have written.
//
// Units whose states rest on a drive are updated one after the other, each in a call of its own.
// Their segments share one buffer on the host, which has a unit's masters during its call only.
//
// Threads: one thread at a time. Ownership: makes the Weights hold every master that is not on a
// drive, so these must fit in memory together. Lends gradients to the callback, scaled in place
// unless they lie elsewhere or have a narrower type. The layer above brings the callback.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// This rank's part of one parameter; the layer above wraps it as a tensor.
struct ExternalSegment {
  int param = 0;
  int group = 0;
  std::span<float> weight;
  bool on_drive = false;  // it has values during its unit's update only
  bool on_host = false;   // the weight and its gradients are for the host, not for kernels
};

class ExternalOptimizer final : public ShardedOptimizer {
 public:
  // `gradients`: scaled, by segment, as long as its weight; empty where no rank had one in this
  // step, and where another call of the step has it. They are the callback's until it returns.
  using Update = std::function<void(std::span<const std::span<float>> gradients)>;

  // Notifies `watch` of copies to the host and back.
  ExternalOptimizer(OptimizerShards& shards, device::Device& device, offload::LinkWatch& watch);

  const std::vector<ExternalSegment>& segments() {
    prepare();
    return segments_;
  }
  // add() appends more segments, and may move others to another group.
  // Called by step(); must update the weights of the segments that have gradients.
  void set_update(Update update) { update_ = std::move(update); }

  void prepare() override;
  void add(int /*unit*/, bool /*is_new*/) override {
    prepared_ = false;
    prepare();
  }
  std::vector<int> order(std::span<const int> /*first*/) const override {
    return shards_.order({});
  }
  void step(std::span<const GroupScalars> groups, const GradientScale& scale,
            std::span<const int> first, const Updated& updated) override;
  device::Stream& stream() override { return device_.compute_stream(); }
  std::int64_t steps() const override { return steps_; }
  // From then on the segments are others: segments() returns them, after reload_states().
  void offload_states(bool masters) override;
  void reload_states() override {}

 private:
  const Unit& of(const OptimizerShards::UnitShard& shard) const {
    return nth(shards_.weights().units(), shard.unit);
  }
  // Whether the device's kernels reach the unit's states over the link.
  bool is_far(const Unit& unit) const {
    return device_.runs_ahead() && shards_.states_on_host(unit);
  }
  // Whether fp32 weights have a copy, since the update does not work where they lie.
  bool has_copy(const Unit& unit) const {
    return !shards_.states_on_drive(unit) &&
           shards_.weights().master_form(unit.id) == plan::MasterForm::kShard &&
           (unit.offloaded || is_far(unit));
  }
  // Whether gradients are not in fp32 where the update works.
  bool gradient_moves(const Unit& unit) const {
    const GradientShards& gradients = shards_.gradients();
    if (gradients.dtype() != DType::kFloat32) return true;
    return device_.runs_ahead() && gradients.on_host(unit.id) != shards_.states_on_host(unit);
  }

  std::span<float> masters_of(const Unit& unit);
  // Calls `queue`, which queues work that moves `up` and `down` bytes over the link at once.
  void move(Bytes up, Bytes down, const offload::LinkWatch::Call& queue) {
    if (!device_.runs_ahead()) return queue();
    device::Stream& stream = device_.compute_stream();
    watch_.copy(offload::Link::kUp, up, stream,
                [&] { watch_.copy(offload::Link::kDown, down, stream, queue); });
  }
  void move_copy(const Unit& unit, std::span<float> values, offload::Access access);
  // target = factor * source, which may be the same span.
  void multiply(std::span<float> target, std::span<const float> source, float factor) {
    const std::byte* const sources[] = {std::as_bytes(source).data()};
    device_.sum_in_order(target, sources, DType::kFloat32, factor, /*accumulate=*/false,
                         device_.compute_stream());
  }
  std::span<float> scaled_gradient(const Unit& unit, float scale);
  void lend_gradients(const OptimizerShards::UnitShard& shard, std::span<float> all,
                      std::vector<std::span<float>>& gradients);
  void update_resident(float scale);
  bool on_drive(const OptimizerShards::UnitShard& shard) const {
    return shards_.states_on_drive(of(shard));
  }
  void make_stages();
  void move_masters(const Unit& unit, offload::Access access);
  void update_on_drive(const OptimizerShards::UnitShard& shard, std::size_t first_segment,
                       float scale);
  void take_back(const OptimizerShards::UnitShard& shard);
  void round(const OptimizerShards::UnitShard& shard);

  OptimizerShards& shards_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  bool prepared_ = false;
  std::vector<ExternalSegment> segments_;
  // For values that the engine has elsewhere, or narrower.
  ShardMemory copies_;  // of fp32 weights
  ShardMemory wide_;    // gradients
  // The size is that of the largest unit whose states rest on a drive; null: there is none.
  std::unique_ptr<device::Memory> master_stage_;
  std::unique_ptr<device::Memory> gradient_stage_;
  Update update_;
  std::int64_t steps_ = 0;
};

}  // namespace strata::engine
