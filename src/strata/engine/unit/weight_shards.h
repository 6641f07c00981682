// The blocks of a StateStore that hold a value for each element of a unit's shard (masters,
// exp_avg, ...), and a walk over the shard in ranges of elements, in which all blocks are leased
// together. A store in memory lends the whole shard at once; a store on a drive lends as much as
// its memory has room for. Threads: one at a time. Errors: those of the store.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "strata/base/units.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

struct StateBlock {
  offload::BlockId id = -1;
  int bits = 32;  // of each element: a power of two
};

// Elements of a shard, and the lease of each block, in the blocks' order. Each lease begins at the
// element `first`, a multiple of 8.
struct StateRange {
  Numel first;
  Numel end;
  std::span<const std::unique_ptr<offload::Lease>> leases;

  std::span<std::byte> bytes(std::size_t block) const { return leases[block]->bytes(); }
};

inline constexpr Bytes kNoRangeLimit = Bytes(std::numeric_limits<std::int64_t>::max());

// Calls `work` with ranges that cover elements [begin, end) of a shard of `numel` elements, and as
// little beside them as the store allows. Work that it queues on the compute stream may still run
// when this returns. `limit`: a range holds at most these bytes of all blocks; the store's own
// limit holds, too.
void for_each_range(offload::StateStore& store, std::span<const StateBlock> blocks, Numel numel,
                    Numel begin, Numel end, offload::Access access,
                    const std::function<void(const StateRange&)>& work,
                    Bytes limit = kNoRangeLimit);

// The weights of this rank's shards. They rest in device memory or, for offloaded units
// (Unit::offloaded), in a StateStore. All reads and writes of them go through this class, in pieces
// as large as the store lends at once.
//
// Threads: one thread at a time. Ownership: borrows the units and the store. Errors: those of the
// store; UsageError while weights are parked.
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
