// Brings units' whole weights into memory when a scope needs them and lets them go afterwards.
//
// acquire() pins a unit: its flat buffer is complete and stays. release() unpins it: the memory is
// kept while the bound on gathered bytes allows, so that the backward pass finds the last blocks of
// the forward pass still there, and goes when something that is used sooner needs the room. Which
// unit is used when is learned (plan::FetchOrder) and also drives prefetching, within its own
// bound. Units that are whole are always complete, except between a change of the shards and
// refresh_whole().
//
// States of a sharded unit: released (no memory) -> gathering (memory, an operation runs) ->
// gathered (memory, parameters attached, pinned or evictable) -> released. Threads: one thread at a
// time. Errors: CommError from the collectives, OutOfMemoryError; the unit is released then and may
// be acquired again.
#pragma once

#include <memory>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/unit.h"
#include "strata/memory/buffer_pool.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

struct GatherBounds {
  Bytes max_live;  // gathered bytes; exceeded only by what is pinned at once
  Bytes prefetch;  // of these, fetched ahead of use
};

class Gatherer {
 public:
  Gatherer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
           ParameterViews& views, GatherBounds bounds);
  ~Gatherer();

  // A pass is what repeats: the forward and backward of one micro-step.
  void start_pass() { order_.start_pass(); }

  void acquire(int unit);
  void release(int unit);
  // Unpins, and drops the gathered copy with whatever was written to it (when no one else pins it).
  void discard(int unit);
  bool gathered(int unit) const;
  bool pinned(int unit) const;

  // The shards have changed, or are about to: drops every gathered copy. UsageError if one is
  // pinned.
  void invalidate();
  // Collective: completes the whole units from everybody's changed shards.
  void refresh_whole();
  // Frees what no one pins.
  void evict_all();

  Bytes live() const { return live_; }
  const plan::FetchOrder& order() const { return order_; }
  // The flat buffer of a gathered or whole unit.
  std::span<std::byte> flat(int unit) const;

 private:
  using Pool = memory::BufferPool<device::Memory>;
  enum class State { kReleased, kGathering, kGathered };
  struct Slot {
    State state = State::kReleased;
    int pins = 0;
    Pool::Lease memory;
    std::unique_ptr<comm::Work> work;
  };

  void start(int unit);
  void finish(int unit);
  void drop(int unit);
  // Evicts unpinned units that are used later than `distance`; true if `bytes` fit then.
  bool make_room(Bytes bytes, std::int64_t distance);
  void prefetch();
  Slot& slot(int unit) { return slots_[static_cast<std::size_t>(unit)]; }
  const Slot& slot(int unit) const { return slots_[static_cast<std::size_t>(unit)]; }
  Unit& unit(int index) { return units_[static_cast<std::size_t>(index)]; }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  ParameterViews& views_;
  GatherBounds bounds_;
  plan::FetchOrder order_;
  Pool pool_;
  std::vector<Slot> slots_;
  Bytes live_;
};

}  // namespace strata::engine
