// Gathers units' whole weights when a scope needs them, and releases them afterwards.
//
// acquire() pins a unit: its flat buffer is complete and stays. release() unpins it. The unit's
// memory stays while the bound on gathered bytes allows, so that the backward pass still finds the
// last blocks of the forward pass; a unit that is used sooner may take the room. The Gatherer
// learns the order of uses (plan::FetchOrder), which also drives prefetching, within a bound of its
// own. Units that stay whole are complete, except between a change of the shards and
// gather_whole(). With `gather_lazily` they may stay incomplete longer, until their first acquire()
// or complete(). The Gatherer decides; GatheredUnits and WholeUnits hold the state of sharded and
// of whole units.
//
// Threads: complete(), complete_all(), wait_for_readers(), and gathered() of whole units: any
// thread, beside all other calls. The rest: one thread at a time. Errors: CommError from the
// collectives. OutOfMemoryError after all unpinned units were evicted; it lists the pinned ones.
// The unit is released and unpinned then, and may be acquired again. If memory does not suffice for
// a prefetch, it is left out, on all ranks where gathers are collectives (GatherMemory). UsageError
// from acquire() of a unit whose weights are offloaded (offload_states()).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gathered_units.h"
#include "strata/engine/gather/whole_units.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

// The needs of a model's scopes: how much memory at once, and which units in which order. Pure
// functions of the plan.

// The most memory that the units of one scope take when they are whole.
enum class ScopeUnits { kSharded, kAll };
Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which);

// The bytes that may be prefetched together despite other bounds: the units of a scope, or none.
Bytes fetched_together(const EngineOptions& options, std::span<const plan::ScopeSpec> scopes,
                       std::span<const Unit> units);

// The bytes of gradients that may be under reduction before the next ones are written:
// EngineOptions::max_reducing. With tiles it is 0, since the device has no room for more than the
// gradient that is being written.
Bytes most_reducing(const EngineOptions& options, std::span<const Unit> units);

// The predicted order of the units' uses in the first pass: forward through the scopes, then
// backward. Both times a scope's units come in their order, and then its tiles one by one,
// backwards the second time.
std::vector<int> expected_uses(std::span<const plan::ScopeSpec> scopes);

// The shards that change: those of all units, or those that an optimizer step updates.
enum class Changed { kAll, kTrainable };

class Gatherer {
 public:
  // `shards`: the weights of these units.
  Gatherer(std::vector<Unit>& units, const WeightShards& shards, comm::Collectives& collectives,
           device::Device& device, ParameterViews& views, StepRecorder& recorder,
           GatherBounds bounds);

  // A pass repeats: the forward and backward of one micro-step.
  void start_pass();
  // Predicts the uses of the first pass.
  void expect(std::vector<int> uses) { order_.expect(std::move(uses)); }

  void acquire(int unit);
  // This rank does not use the unit, but other ranks may acquire() it now. Its gradients are
  // reduced all the same.
  void leave_out(int unit) { order_.record_skipped(unit); }
  void release(int unit);
  // Unpins the unit, and drops values that were written to the gathered copy: if another pin holds
  // it, it is gathered again in place.
  void discard(int unit);
  // Work that the compute stream gets from now on finds the whole unit's values complete, and may
  // write them.
  void complete(int unit) {
    whole_.complete(unit);
    whole_.wait_for_readers();
  }
  // Completes all whole units, before their shards change, or before this rank's peers leave.
  void complete_all() {
    whole_.complete_all();
    whole_.wait_for_readers();
  }
  // Called before a script may write weights of whole units: peers have read them when this
  // returns.
  void wait_for_readers() { whole_.wait_for_readers(); }
  bool gathered(int unit) const;
  bool pinned(int unit) const { return gathered_.pinned(unit); }

  // Shards have changed, or are about to: drops the gathered copies of them. UsageError if one is
  // pinned; nothing is dropped then.
  void invalidate(Changed changed);
  // Collective: copies all ranks' changed shards into the whole units, except those that
  // fetch_first() has started. They are complete when this returns; with `late`, and if the bounds
  // allow it, some may still be under way.
  void gather_whole(Changed changed, bool late);
  // Trainable units that this rank's next pass uses before anything else, in their order.
  std::vector<int> first_needed() const;
  // Starts to gather these units for the next pass; their shards are new on every rank by now.
  // Collective for units that stay whole; gather_whole() ends it.
  void fetch_first(std::span<const int> units);
  // Whether fetch_first() has started this whole unit.
  bool begun(int unit) const { return whole_.started(unit); }
  // Ends only the gathers that fetch_first() has started, since the shards are no good.
  void abandon_lazy_gather() { whole_.abandon(); }
  // Releases all unpinned units.
  void evict_all() { gathered_.evict_all(); }
  // Also frees buffers that are kept for later gathers. Collective where gathers are.
  void free_memory() { gathered_.free_memory(); }
  // For Weights::offload_states() and reload_states(): whole units lose their memory, and get it
  // back. No unit is gathered then, and no refresh is under way.
  void detach_whole() { whole_.detach(); }
  void attach_whole() { whole_.attach(); }

  Bytes live() const { return gathered_.live(); }  // of gathered units and those being gathered
  // Buffers made since construction.
  std::int64_t allocations() const { return gathered_.allocations(); }
  const plan::FetchOrder& order() const { return order_; }
  // The flat buffer of a gathered or whole unit.
  std::span<std::byte> flat(int unit) const;

 private:
  std::vector<int> whole_units(Changed changed) const;
  void prefetch();
  const Unit& unit(int index) const { return nth(units_, index); }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  GatherBounds bounds_;
  plan::FetchOrder order_;
  GatheredUnits gathered_;
  WholeUnits whole_;
  bool prefetches_;  // there are sharded units, and a bound for fetching them ahead
};

}  // namespace strata::engine
