// This rank's shards as leases: the weights (WeightShards) and the fp32 masters (MasterStates),
// wherever they rest, and a walk over blocks of a StateStore in ranges of elements.
//
// Threads: one thread at a time. Ownership: borrows the units, the device and the store;
// MasterStates keeps the leases of held masters. Errors: those of the store; UsageError while
// weights are offloaded.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "strata/base/units.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/kernels/master_remainder.h"
#include "strata/offload/state_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// A block of a StateStore that holds a value for each element of a unit's shard (masters, exp_avg,
// ...).
struct StateBlock {
  offload::BlockId id = -1;
  int bits = 32;     // of each `elements`; both are powers of two
  int elements = 1;  // up to 256

  // The bytes of the first `numel` elements; `numel` of all, or a multiple of eight times the
  // elements that share a value.
  Bytes bytes_of(Numel numel) const {
    return Bytes(((numel.value + elements - 1) / elements * bits + 7) / 8);
  }
};

// offload::elements_at_once() for blocks.
Numel elements_at_once(std::span<const StateBlock> blocks, Bytes budget);

// Elements of a shard, and the lease of each block, in the blocks' order. Each lease begins at the
// element `first`, a multiple of 8. Elements [low, high) of it were asked for.
struct StateRange {
  Numel first;
  Numel low;
  Numel high;
  std::span<const std::unique_ptr<offload::Lease>> leases;

  std::span<std::byte> bytes(std::size_t block) const { return leases[block]->bytes(); }
  // The elements that were asked for, of the first block.
  std::span<std::byte> wanted(DType dtype) const {
    return bytes(0).subspan(bytes_of(low - first, dtype).size(),
                            bytes_of(high - low, dtype).size());
  }
};

inline constexpr Bytes kNoRangeLimit = Bytes(std::numeric_limits<std::int64_t>::max());

// Calls `work` with ranges that cover elements [begin, end) of a shard of `numel` elements, and as
// little beside them as the store allows: a store in memory lends the whole shard at once, a store
// on a drive as much as its memory has room for, and at most `limit` of all blocks. Work that it
// queues on the compute stream may still run when this returns.
void for_each_range(offload::StateStore& store, std::span<const StateBlock> blocks, Numel numel,
                    Numel begin, Numel end, offload::Access access,
                    const std::function<void(const StateRange&)>& work,
                    Bytes limit = kNoRangeLimit);

// The weights of this rank's shards, in device memory or, for offloaded units (Unit::offloaded), in
// a StateStore. All reads and writes go through this class, in pieces as large as the store lends.
class WeightShards {
 public:
  // `units` by their ids. `store` may be null where none is offloaded.
  WeightShards(const std::vector<Unit>& units, offload::StateStore* store)
      : units_(units), store_(store) {}

  // Reserves zeroed room for the offloaded ones of the next units, in their order.
  void add(std::span<const Unit> units);

  // Where an offloaded unit's weights rest.
  memory::Tier tier_of(const Unit& unit) const {
    return unit.spec.place.weights.value_or(store_->tier());
  }

  // As StateStore says of blocks; nothing is cached of units that are not offloaded.
  bool cache(const Unit& unit, device::Stream& stream) const {
    return store_->cache({&nth(blocks_, unit.id), 1}, stream);
  }
  bool cached(const Unit& unit) const {
    return unit.offloaded && store_->cached(nth(blocks_, unit.id));
  }
  void drop_cached() const {
    if (store_ != nullptr) store_->drop_cached();
  }

  // Elements of a unit's shard, and their address.
  struct Piece {
    Numel begin;
    Numel end;
    std::span<std::byte> bytes;
    offload::Lease* lease;  // of these bytes; null: they stay where they are
  };
  // Calls `work` with pieces that cover elements [begin, end). Work that it queues on `stream`
  // finds the values of the last update, and may still run when this returns.
  using Work = std::function<void(const Piece&)>;
  void for_each(int unit, Numel begin, Numel end, offload::Access access, device::Stream& stream,
                const Work& work) const;

 private:
  const std::vector<Unit>& units_;
  offload::StateStore* store_;
  std::vector<offload::BlockId> blocks_;  // by unit, of those that were added; -1: not offloaded
};

// A part of this rank's shard of a unit.
struct ShardPart {
  int unit;
  Numel begin, end;
};
// Parts that were stored without their fp32 masters. A kernel between two copies leaves the link
// between host and device idle, so masters of many stores are made at once
// (Weights::make_masters()).
using OwedMasters = std::vector<ShardPart>;
// Returns all of them, by unit and offset, with neighbours joined; then none is owed any more.
OwedMasters take_joined(OwedMasters& owed);

// The fp32 master weights of this rank's shards, as far as the StateStore keeps them beside the
// weights (plan/unit_plan.h).
class MasterStates {
 public:
  // `masters`: where the weights are bf16. `units` by their ids; they may grow no more. `shards`:
  // their weights.
  MasterStates(const std::vector<Unit>& units, const WeightShards& shards, plan::Masters masters,
               device::Device& device, offload::StateStore& store)
      : units_(units), shards_(shards), masters_(masters), device_(device), store_(store) {}

  plan::MasterForm form(int unit) const { return plan::master_form(of(unit).spec, masters_); }
  // Takes the room of these units; zero.
  void add(std::span<const Unit> units);

  // Takes the room of a unit that was frozen when it was added, and makes its masters from its
  // weights.
  void train(const Unit& unit);

  // The blocks of an added unit: none, fp32 masters, or the two arrays of their remainder
  // (remainder_in()).
  const std::vector<StateBlock>& blocks(int unit) const { return blocks_.at(unit); }
  // The remainder in a range over blocks that begin with those of blocks().
  static kernels::MasterRemainder remainder_in(const StateRange& range) {
    return {reinterpret_cast<std::uint16_t*>(range.bytes(0).data()),
            reinterpret_cast<std::uint8_t*>(range.bytes(1).data())};
  }
  // Goes through blocks() of elements [begin, end) as for_each_range() does; also where they are
  // held.
  void for_each(int unit, Numel begin, Numel end, offload::Access access,
                const std::function<void(const StateRange&)>& work);

  // The optimizer updates all of them.
  void note_update() { fresh_.clear(); }
  // Queues: masters of the elements from `begin` on take these values, which kernels can read.
  void make(int unit, Numel begin, Numel numel, const std::byte* source, DType source_dtype);
  // Queues: the weights of elements [begin, end) become their rounded fp32 masters (for optimizers
  // that know only masters).
  void round(int unit, Numel begin, Numel end);
  void round(int unit) { round(unit, Numel(), of(unit).layout.shard()); }
  // Queues: fp32 masters beside weights that stay whole take the values that a script has written
  // into these weights since the last step.
  void adopt_written(int unit);
  // Keeps the unit's fp32 masters in memory, at this address, for as long as this lives: the shard
  // itself, or a lease of the store.
  std::span<std::byte> hold(int unit);
  // Gives back all leases of hold().
  void let_go() { held_.clear(); }

 private:
  const Unit& of(int unit) const { return nth(units_, unit); }

  const std::vector<Unit>& units_;
  const WeightShards& shards_;
  plan::Masters masters_;
  device::Device& device_;
  offload::StateStore& store_;
  std::map<int, std::vector<StateBlock>> blocks_;        // by unit, of those that were added
  std::map<int, std::unique_ptr<offload::Lease>> held_;  // by unit
  std::set<int> fresh_;                                  // units: still zeroes
};

}  // namespace strata::engine
