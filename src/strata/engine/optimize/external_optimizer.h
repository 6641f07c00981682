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
// Where the optimizer needs whole parameters, the segments are those that this rank owns
// (whole_parameters.h), and a step goes over all ranks of a shard group: each gets the values and
// gradients of its parameters, and all agree on the outcome of their calls.
//
// Threads: one thread at a time. Ownership: makes the Weights hold every master that is not on a
// drive, so these must fit in memory together. Lends gradients to the callback, scaled in place
// unless they lie elsewhere or have a narrower type. The layer above brings the callback.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/external_masters.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/engine/optimize/whole_parameters.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// This rank's part of one parameter, or the whole one; the layer above wraps it as a tensor.
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
  // Collective, before anything else: the optimizer needs whole parameters. The arguments are those
  // of WholeParameters.
  void take_whole(comm::Collectives& collectives, const std::string& name, bool together);

  const std::vector<ExternalSegment>& segments() {
    prepare();
    return segments_;
  }
  // add() appends more segments, and may move others to another group.
  // Called by step(); must update the weights of the segments that have gradients.
  void set_update(Update update) { update_ = std::move(update); }
  // Collective, between steps: `change` may write to the segments' weights, which have the present
  // masters meanwhile, and masters and weights follow; Engine::weights_changed() is for the caller.
  // `change` throws on all ranks or on none, and nothing follows then. UsageError where states rest
  // on a drive.
  void edit(const std::function<void()>& change);

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
  // Whether gradients are not in fp32 where the update works.
  bool gradient_moves(const Unit& unit) const {
    const GradientShards& gradients = shards_.gradients();
    if (gradients.dtype() != DType::kFloat32) return true;
    return device_.runs_ahead() && gradients.on_host(unit.id) != shards_.states_on_host(unit);
  }

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
  void update_whole(float scale);
  void bring_weights();
  void await_far();
  ExternalMasters::Skips left_out();
  void take_back_all(const ExternalMasters::Skips& skips);
  bool on_drive(const OptimizerShards::UnitShard& shard) const {
    return shards_.states_on_drive(masters_.of(shard));
  }
  void make_stages();
  void move_masters(const Unit& unit, offload::Access access);
  void update_on_drive(const OptimizerShards::UnitShard& shard, std::size_t first_segment,
                       float scale);

  OptimizerShards& shards_;
  device::Device& device_;
  ExternalMasters masters_;
  bool prepared_ = false;
  std::vector<ExternalSegment> segments_;
  ShardMemory wide_;  // gradients that the engine has elsewhere, or narrower
  // The size is that of the largest unit whose states rest on a drive; null: there is none.
  std::unique_ptr<device::Memory> master_stage_;
  std::unique_ptr<device::Memory> gradient_stage_;
  std::optional<WholeParameters> whole_;      // absent: each rank updates its own parts
  comm::Collectives* collectives_ = nullptr;  // not null: of whole_
  Update update_;
  std::int64_t steps_ = 0;
};

}  // namespace strata::engine
