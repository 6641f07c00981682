// The fp32 masters of this rank's shards, where an optimizer of the user's works on them: where
// they lie, or copies of fp32 weights that lie elsewhere. Weights follow them: each is its master,
// rounded.
//
// Threads: one thread at a time. Ownership: borrows the shards and the device; makes the Weights
// hold every master that is not on a drive, so these must fit in memory together. Errors:
// OutOfMemoryError.
#pragma once

#include <functional>
#include <span>

#include "strata/device/device.h"
#include "strata/engine/optimize/sharded_optimizer.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class ExternalMasters {
 public:
  // Notifies `watch` of copies to the host and back.
  ExternalMasters(OptimizerShards& shards, device::Device& device, offload::LinkWatch& watch);

  const Unit& of(const OptimizerShards::UnitShard& shard) const {
    return nth(shards_.weights().units(), shard.unit);
  }
  // Whether the device's kernels reach the unit's states over the link.
  bool is_far(const Unit& unit) const {
    return device_.runs_ahead() && shards_.states_on_host(unit);
  }
  // Calls `queue`, which queues work that moves `up` and `down` bytes over the link at once.
  void move(Bytes up, Bytes down, const offload::LinkWatch::Call& queue) {
    if (!device_.runs_ahead()) return queue();
    device::Stream& stream = device_.compute_stream();
    watch_.copy(offload::Link::kUp, up, stream,
                [&] { watch_.copy(offload::Link::kDown, down, stream, queue); });
  }

  // The masters of a unit that does not rest on a drive; the address stays until free().
  std::span<float> values(const Unit& unit);
  // Queues: values() are the present masters, with what scripts have written into the weights.
  void read(const Unit& unit);
  // Queues a copy of fp32 weights: from them to `values` (kRead), or from there to them.
  void move_copy(const Unit& unit, std::span<float> values, offload::Access access);

  // Parameters that keep their weights: fp64 weights have more bits than their masters.
  using Skips = std::function<bool(int param)>;
  // Queues: the unit's weights are what the update has made of values().
  void take_back(const OptimizerShards::UnitShard& shard, const Skips& skips);
  // The same, where masters were updated where they lie.
  void round(const OptimizerShards::UnitShard& shard, const Skips& skips);
  void free() {
    copies_.free_on_device();
    shards_.weights().masters().let_go();
  }

 private:
  // Whether fp32 weights have a copy, since the update does not work where they lie.
  bool has_copy(const Unit& unit) const {
    return !shards_.states_on_drive(unit) &&
           shards_.weights().master_form(unit.id) == plan::MasterForm::kShard &&
           (unit.offloaded || is_far(unit));
  }

  OptimizerShards& shards_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  ShardMemory copies_;  // of fp32 weights
};

}  // namespace strata::engine
