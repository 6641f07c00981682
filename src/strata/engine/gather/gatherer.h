// Brings units' whole weights into memory when a scope needs them and lets them go afterwards.
//
// acquire() pins a unit: its flat buffer is complete and stays. release() unpins it: the memory is
// kept while the bound on gathered bytes allows, so that the backward pass finds the last blocks of
// the forward pass still there, and goes when something that is used sooner needs the room. Which
// unit is used when is learned (plan::FetchOrder) and also drives prefetching, within its own
// bound. Freed buffers are kept for the next gather of their size, within the bound where it is
// hard, so that a pass allocates nothing once its sizes have been seen. Units that are
// whole are complete, except between a change of the shards and refresh_whole(); where the bounds
// say `refresh_late`, until they are first acquired after that, or somebody asks (complete()).
//
// States of a sharded unit: released (no memory) -> gathering (memory, an operation runs) ->
// gathered (memory, parameters attached, pinned or evictable) -> released. A whole one is gathered
// or gathering. Threads: one thread at a time. Errors: CommError from the collectives;
// OutOfMemoryError, after all that no one pins has been evicted, which says what is pinned. The
// unit is released and unpinned then, and may be acquired again. A prefetch for which memory does
// not suffice is left out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/unit.h"
#include "strata/memory/buffer_pool.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

struct GatherBounds {
  Bytes max_live;       // gathered bytes and free buffers; exceeded only by what is pinned at once
  Bytes prefetch;       // fetched ahead of use; none where 0
  bool hard = true;     // false: `least_ahead` is fetched even where it exceeds max_live
  Bytes least_ahead{};  // fetched ahead in any case: the units of a scope, which come together
  bool refresh_late = false;  // whole units may be gathering when a step is over
  // A unit goes, whatever would fit, unless it is used again with at most so many elements of
  // others in between.
  std::optional<Numel> max_reuse{};
};

// Whose shards change: everybody's, or those that an optimizer step updates.
enum class Changed { kAll, kTrainable };

class Gatherer {
 public:
  Gatherer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
           ParameterViews& views, StepRecorder& recorder, GatherBounds bounds);
  ~Gatherer();

  // A pass is what repeats: the forward and backward of one micro-step.
  void start_pass();
  // What the first pass uses, as far as one can tell.
  void expect(std::vector<int> uses) { order_.expect(std::move(uses)); }

  void acquire(int unit);
  void release(int unit);
  // Unpins, and drops whatever was written to the gathered copy: where someone else pins it, it is
  // gathered anew in place.
  void discard(int unit);
  // Makes a whole unit's values complete for what the compute stream gets from now on.
  void complete(int unit);
  // All of them; before their shards change, or this rank's peers go.
  void complete_all();
  bool gathered(int unit) const;
  bool pinned(int unit) const;

  // Shards have changed, or are about to: drops the gathered copies of them. UsageError if one is
  // pinned; nothing is dropped then.
  void invalidate(Changed changed);
  // Collective: brings everybody's changed shards into the whole units, but for those that
  // fetch_first() has begun with. They are complete when this returns, or begun with where
  // `late` and the bounds allow it.
  void refresh_whole(Changed changed, bool late);
  // Trainable units that this rank's next pass uses before anything else, in their order.
  std::vector<int> first_needed() const;
  // Starts to bring these units, whose shards are new on every rank by now, to where the next pass
  // finds them. Collective as far as they stay whole; refresh_whole() ends it.
  void fetch_first(std::span<const int> units);
  // Whether fetch_first() has begun with this whole unit.
  bool begun(int unit) const;
  // Ends what fetch_first() has begun with, and nothing else: the shards are no good.
  void abandon_refresh();
  // Frees what no one pins.
  void evict_all();

  Bytes live() const { return live_; }  // of gathered units and those being gathered
  // Buffers made since construction.
  std::int64_t allocations() const { return pool_.allocations(); }
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
    StepRecorder::Recording recording;  // of `work`
    bool awaited = false;               // readers are told to ask for it
  };

  void gather(int unit);
  void count_use(int unit);
  void start(int unit);
  void start_refresh(int unit);
  std::vector<int> whole_units(Changed changed) const;
  void finish(int unit);
  // Memory for a unit in use, whatever must be evicted for it.
  Pool::Lease take(int unit);
  [[noreturn]] void report_exhausted(int unit, const std::string& cause) const;
  void drop(int unit);
  // Evicts unpinned units that are used later than `distance`; true if `bytes` fit then.
  bool make_room(Bytes bytes, std::int64_t distance);
  int farthest(Bytes bytes, std::int64_t distance) const;
  void drop_what_is_not_reused_soon(int current);
  void prefetch();
  bool fits_ahead(Bytes bytes) const;
  // Gathers the unit, which is released, if it fits; nothing is evicted for it.
  bool start_if_it_fits(int unit);
  Slot& slot(int unit) { return slots_[static_cast<std::size_t>(unit)]; }
  const Slot& slot(int unit) const { return slots_[static_cast<std::size_t>(unit)]; }
  const Unit& unit(int index) const { return units_[static_cast<std::size_t>(index)]; }
  // What a unit takes while it is gathered.
  Bytes footprint(int index) const { return Pool::footprint(unit(index).layout.flat_bytes()); }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  ParameterViews& views_;
  StepRecorder& recorder_;
  GatherBounds bounds_;
  plan::FetchOrder order_;
  Pool pool_;
  std::vector<Slot> slots_;
  bool prefetches_;  // there are sharded units, and a bound for fetching them ahead
  Bytes live_;
  std::vector<int> refreshing_;  // whole units, from fetch_first() to the end of refresh_whole()
};

}  // namespace strata::engine
