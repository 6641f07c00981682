// The sharded units while they have memory: released (no memory) -> gathering (an operation runs)
// -> gathered (parameters attached, pinned or evictable) -> released. The gathered bytes have a
// bound, which only units in use may exceed. The unit that is used last is evicted first
// (plan::FetchOrder).
//
// Threads: one thread at a time. Ownership: owns the memory; borrows the rest. Errors: CommError
// from the collectives. OutOfMemoryError from gather() after all unpinned units were evicted; it
// lists the pinned ones. The unit is released then.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/memory/buffer_pool.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/state_store.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

// Memory for units while they are gathered (memory::BufferPool).
//
// Where gathers are one-sided, a rank whose device is out of memory may gather less than others.
// Where they are collectives, all ranks have to gather the same. So whenever ranks make a buffer,
// they agree whether all of them got one: if one rank has no memory, take() fails on all. Ranks
// make buffers at the same points, since they give back and free the same ones. Several shard
// groups may gather different units and cannot agree; there a shortage is an error
// (may_do_without()). It must outlive its leases. Errors: CommError from take() where it agrees.
class GatherMemory {
 public:
  using Pool = memory::BufferPool<device::Memory>;

  GatherMemory(device::Device& device, comm::Collectives& collectives);

  // Its rounds are passes. Ranks that agree trim it together.
  Pool& pool() { return pool_; }

  // `shortage` empty: `lease` has the memory. Otherwise this rank, or the rank that `shortage`
  // names if ranks agree, has no memory for it; unused buffers have been freed.
  struct Taken {
    Pool::Lease lease;
    std::string shortage;
  };
  Taken take(Bytes footprint);
  // Takes the buffer out of a lease, which gets another one. Null: there is no memory for that.
  std::shared_ptr<device::Memory> replace(Pool::Lease& lease);
  // Whether a rank may go on with less than take() was asked for.
  bool may_do_without() const { return ranks_ != Ranks::kCannotAgree; }

 private:
  // How the ranks that gather together ensure that they gather the same.
  enum class Ranks { kNeedNot, kAgree, kCannotAgree };
  static Ranks ranks_of(const comm::Collectives& collectives) {
    const comm::ShardPosition place = collectives.shard_position();
    if (collectives.traits().one_sided || place.held_count() == 1) return Ranks::kNeedNot;
    return place.groups == 1 ? Ranks::kAgree : Ranks::kCannotAgree;
  }

  Taken take_together(Bytes footprint);  // collective

  comm::Collectives& collectives_;
  Ranks ranks_;
  Pool pool_;
};

// Gathers every rank's shard of a unit into a flat buffer. The collectives alone gather shards in
// device memory. An offloaded shard is first copied to its offset in the flat buffer, on a stream
// of its own, beside the model's work; the gather among ranks follows in place.
//
// Threads: one thread at a time; if anything is offloaded, all ranks gather the same units in the
// same order. Ownership: borrows all; a Work may outlive the call, but not this object. Errors:
// CommError; IoError of a drive, which the other ranks get as a CommError that names this rank.
class ShardGather {
 public:
  // Notifies `watch` of its copies.
  ShardGather(const WeightShards& shards, comm::Collectives& collectives, device::Device& device,
              offload::LinkWatch& watch)
      : shards_(shards), collectives_(collectives), device_(device), watch_(watch) {}

  // `flat` has the unit's whole size; the compute stream no longer uses its old content.
  std::unique_ptr<comm::Work> start(const Unit& unit, std::span<std::byte> flat);

 private:
  // Copies the shard to its offset in the flat buffer.
  void upload(const Unit& unit, std::span<std::byte> own);

  const WeightShards& shards_;
  comm::Collectives& collectives_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  std::unique_ptr<device::Stream> uploads_;  // null: none yet
};

class GatheredUnits : NonCopyable {
 public:
  // `order`: the order of uses; it and `units` belong to the Gatherer. `shards`: the weights of
  // these units. `least_ahead`: see fits_ahead().
  GatheredUnits(const std::vector<Unit>& units, const WeightShards& shards,
                comm::Collectives& collectives, device::Device& device, ParameterViews& views,
                StepRecorder& recorder, const plan::FetchOrder& order, const EngineOptions& options,
                Bytes least_ahead);
  ~GatheredUnits();

  bool released(int unit) const { return of(unit).state == State::kReleased; }
  bool gathered(int unit) const { return of(unit).state == State::kGathered; }
  std::span<std::byte> flat(int index) const {  // of a gathered unit
    STRATA_ASSERT(gathered(index));
    return of(index).memory->bytes().first(unit(index).layout.flat_bytes().size());
  }

  // A pin keeps a unit's memory. Whole units may be pinned, to no effect.
  void pin(int unit) { ++of(unit).pins; }
  void unpin(int index) {
    STRATA_ASSERT(of(index).pins > 0);
    --of(index).pins;
  }
  bool pinned(int unit) const { return of(unit).pins > 0; }

  // The unit is gathered when this returns. It evicts any unpinned unit that it must.
  void gather(int unit);
  // Starts to gather a released unit; false: there is no memory for it. Nothing is evicted.
  bool start_ahead(int unit);
  void drop(int unit);
  // Gathers the weights of a gathered unit again, in place.
  void gather_again(int index) { gathers_.start(unit(index), flat(index))->wait(); }

  // Evicts unpinned units that are used later than `distance`; true if `bytes` fit then.
  bool make_room(Bytes bytes, std::int64_t distance);
  // Whether `bytes` may be prefetched even though they exceed the bound: only if they and all
  // unpinned units together have at most `least_ahead`, or no unit is unpinned. A unit that was
  // prefetched in vain stays until it is evicted for a unit in use.
  bool fits_ahead(Bytes bytes) const;
  // Releases unpinned units that are not used again within EngineOptions::max_reuse.
  void drop_what_is_not_reused_soon(int current);
  // Releases the unpinned tiles, except `current`, which is used next, and, if that is no tile, one
  // that is being prefetched.
  void drop_idle_tiles(int current);
  void evict_all() {
    for (const Unit& u : units_) {
      if (!u.whole && !pinned(u.id)) drop(u.id);
    }
  }
  GatherMemory::Pool& pool() { return memory_.pool(); }

  Bytes live() const { return live_; }  // of gathered units and those being gathered
  // The memory of a unit while it is gathered. All tiles take that of the largest one: buffers are
  // kept by size, and a shorter tile, such as the last one of a parameter, would keep its own.
  Bytes footprint(int index) const {
    const Unit& u = unit(index);
    const Bytes bytes = u.spec.tile() ? largest_tile_ : u.layout.flat_bytes();
    return align_up(std::max(bytes, Bytes(1)), memory::page_size());
  }

 private:
  enum class State { kReleased, kGathering, kGathered };
  struct Slot {
    State state = State::kReleased;
    int pins = 0;
    GatherMemory::Pool::Lease memory;
    std::unique_ptr<comm::Work> work;
    StepRecorder::Recording recording;  // of `work`
  };

  // Takes memory for a unit in use, and evicts any unpinned unit that it must.
  GatherMemory::Pool::Lease take(int unit);
  [[noreturn]] void report_exhausted(int unit, const std::string& cause) const;
  void start(int unit);
  void finish(int unit);
  void detach(int unit);
  int farthest(Bytes bytes, std::int64_t distance) const;
  Slot& of(int unit) { return nth(slots_, unit); }
  const Slot& of(int unit) const { return nth(slots_, unit); }
  const Unit& unit(int index) const { return nth(units_, index); }

  const std::vector<Unit>& units_;
  ShardGather gathers_;
  ParameterViews& views_;
  StepRecorder& recorder_;
  const plan::FetchOrder& order_;
  const EngineOptions& options_;
  Bytes least_ahead_;
  GatherMemory memory_;
  std::vector<Slot> slots_;  // by unit
  std::vector<int> tiles_;   // that have memory
  Bytes largest_tile_;
  Bytes live_;
};

}  // namespace strata::engine
