// The weights of this rank's shards. They rest in device memory or, for offloaded units
// (Unit::offloaded), in a StateStore. All reads and writes of them go through this class, in pieces
// as large as the store lends at once.
//
// Threads: one thread at a time. Ownership: borrows the units and the store. Errors: those of the
// store; UsageError while weights are parked.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "strata/engine/unit/unit.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class WeightShards {
 public:
  // `units` by their ids. `store` may be null where none is offloaded.
  WeightShards(const std::vector<Unit>& units, offload::StateStore* store)
      : units_(units), store_(store) {}

  // Reserves zeroed room for the offloaded ones of the next units, in their order.
  void add(std::span<const Unit> units);

  // Elements of a unit's shard, and their address.
  struct Piece {
    Numel begin;
    Numel end;
    std::span<std::byte> bytes;
    offload::Lease* lease;  // of these bytes; null: they stay where they are
  };
  // Calls `work` with pieces that cover elements [begin, end). Work that it queues on the compute
  // stream may still run when this returns.
  using Work = std::function<void(const Piece&)>;
  void for_each(int unit, Numel begin, Numel end, offload::Access access, const Work& work) const;

 private:
  const std::vector<Unit>& units_;
  offload::StateStore* store_;
  std::vector<offload::BlockId> blocks_;  // by unit, of those that were added; -1: not offloaded
};

}  // namespace strata::engine
