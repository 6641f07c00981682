// Gathers units' whole weights when a scope needs them, and releases them afterwards.
//
// acquire() pins a unit: its flat buffer is complete and stays. release() unpins it. The memory
// stays while the bound on gathered bytes allows, and no unit that is used sooner needs it: so
// backward finds the last blocks of forward. The Gatherer learns the order of uses
// (plan::FetchOrder), which also drives prefetching, within a bound of its own. Units that stay
// whole are complete, except between a change of the shards and gather_whole() or, with
// EngineOptions::gather_lazily, their first acquire() or complete(). The Gatherer decides;
// GatheredUnits and WholeUnits hold the state of sharded and of whole units.
//
// Threads: complete(), complete_all(), wait_for_readers(), and gathered() of whole units: any
// thread, beside all other calls. The rest: one thread at a time. Errors: CommError from the
// collectives. OutOfMemoryError after all unpinned units were evicted; it lists the pinned ones.
// The unit is released and unpinned then, and may be acquired again. If memory does not suffice for
// a prefetch, it is left out, on all ranks where gathers are collectives (GatherMemory). UsageError
// from acquire() of a unit whose weights are offloaded (offload_states()).
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gathered_units.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

// The units that every rank holds whole: a lazy all-gather copies every rank's new shards into each
// rank's flat buffers after they have changed; a rank that is alone only waits for the update. It
// may continue after the step, beside the next forward. Then this class asks the parameters'
// readers to wait (ParameterViews::await()), and code that needs the unit calls complete(). Peers
// may still read this rank's slices then, so code that lets a script write weights calls
// wait_for_readers() first.
//
// Threads: any thread may call complete(), complete_all(), wait_for_readers() and is_complete(),
// beside all other calls, such as a thread that averages weights while another one trains. One
// complete() runs at a time; it queues a wait of the compute stream, or waits itself where the
// collectives wait on the host. All other calls: one thread at a time. Ownership: owns the works.
// Errors: CommError from the collectives; if a gather failed, each complete() of the unit throws
// the error again.
class WholeUnits : NonCopyable {
 public:
  WholeUnits(const std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
             ParameterViews& views, StepRecorder& recorder);
  ~WholeUnits();

  bool is_complete(int unit) const {
    const std::lock_guard lock(mutex_);
    return nth(slots_, unit).work == nullptr;
  }
  // Work that this thread queues on the compute stream from now on finds the unit's values.
  void complete(int unit) {
    const std::lock_guard lock(mutex_);
    finish(unit, of(unit));
  }
  void complete_all() {
    for (const Unit& u : units_) {
      if (u.whole) complete(u.id);
    }
  }
  // Work that this thread queues on the compute stream from now on runs after peers have read this
  // rank's slices. Waits at most once for each end().
  void wait_for_readers();

  // Starts to gather a complete unit again; where gathers are collectives, with all ranks. If the
  // rank is alone, the unit is complete after Unit::updating.
  void start(int unit);
  // Whether start() came for it since the last end() or abandon().
  bool started(int index) const { return std::ranges::find(started_, index) != started_.end(); }
  // A collective of the shard group: the started units are complete when this returns, also on
  // peers. With `late`, units whose readers can wait for them may be under way still.
  void end(bool late);
  // Completes the started gathers and forgets them, since the shards are no good.
  void abandon() {
    started_.clear();
    complete_all();
  }

  // The parameters of complete units lose their memory, and point at it again.
  void detach();
  void attach();

 private:
  struct Slot {
    std::unique_ptr<comm::Work> work;  // null: complete
    StepRecorder::Recording recording;
    bool awaited = false;  // readers wait for it (ParameterViews::await())
  };
  void finish(int unit, Slot& slot);  // the mutex is held
  Slot& of(int unit) { return nth(slots_, unit); }

  const std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  const bool alone_;
  ParameterViews& views_;
  StepRecorder& recorder_;
  mutable std::mutex mutex_;  // guards slots_, readers_, and the views of these units
  std::vector<Slot> slots_;   // by unit; of sharded units unused
  std::vector<int> started_;
  std::unique_ptr<comm::Work> readers_;  // of the last gathers; null: they have finished
};

// The most memory that the units of one of these scopes take at once when they are whole.
enum class ScopeUnits { kSharded, kAll };
Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which);

// The shards that change: those of all units, or those that an optimizer step updates.
enum class Changed { kAll, kTrainable };

class Gatherer {
 public:
  // `shards`: the weights of these units. `scopes`: of the model, for the prediction of the first
  // pass.
  Gatherer(std::vector<Unit>& units, const WeightShards& shards, comm::Collectives& collectives,
           device::Device& device, ParameterViews& views, StepRecorder& recorder,
           const EngineOptions& options, std::span<const plan::ScopeSpec> scopes);

  // A pass repeats: the forward and backward of one micro-step.
  void start_pass() {
    order_.start_pass();
    gathered_.begin_pass();
    if (!options_.max_live_is_hard) gathered_.pool().end_round();
  }

  void acquire(int unit);
  // This rank does not use the unit, but other ranks may acquire() it now.
  void leave_out(int unit) { order_.record_skipped(unit); }
  void release(int index) {
    gathered_.unpin(index);
    if (unit(index).whole || pinned(index)) return;
    if (gathered_.live() > options_.max_live) gathered_.drop(index);
  }
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
  bool gathered(int index) const {
    if (unit(index).away) return false;
    return unit(index).whole ? whole_.is_complete(index) : gathered_.gathered(index);
  }
  bool pinned(int unit) const { return gathered_.pinned(unit); }

  // Shards have changed, or are about to: drops the gathered copies of them. UsageError if one is
  // pinned; nothing is dropped then.
  void invalidate(Changed changed);
  // Collective: copies all ranks' changed shards into the whole units. They are complete when this
  // returns; with `late`, and if the options allow it, some may still be under way.
  void gather_whole(Changed changed, bool late);
  // Whether this rank alone has the whole of each unit. Then whole units are complete after their
  // updates: to_complete(), before gather_whole().
  bool alone() const { return collectives_.shard_position().held_count() == 1; }
  void to_complete(int whole_unit) { whole_.start(whole_unit); }
  // Trainable units that this rank's next pass uses before anything else, in their order.
  std::vector<int> first_needed() const;
  // Starts to gather these units for the next pass; their shards are new on every rank by now.
  // Collective for units that stay whole; gather_whole() ends it.
  void fetch_first(std::span<const int> units);
  // Ends only the gathers that fetch_first() has started, since the shards are no good.
  void abandon_lazy_gather() { whole_.abandon(); }
  // Releases all unpinned units, and frees buffers that are kept for later gathers. Collective
  // where gathers are.
  void free_memory() {
    gathered_.evict_all();
    gathered_.pool().trim();
  }

  GatheredUnits& sharded() { return gathered_; }
  // Their memory comes and goes (Weights::offload_states()) while no unit is gathered, and no lazy
  // all-gather is under way.
  WholeUnits& whole() { return whole_; }
  const plan::FetchOrder& order() const { return order_; }
  // The flat buffer of a gathered or whole unit.
  std::span<std::byte> flat(int index) const {
    return unit(index).whole ? unit(index).resident : gathered_.flat(index);
  }

 private:
  std::vector<int> whole_units(Changed changed) const;
  void prefetch();
  const Unit& unit(int index) const { return nth(units_, index); }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  const EngineOptions& options_;
  Bytes least_ahead_;    // prefetched despite other bounds: the units of a scope, or none
  bool gathers_lazily_;  // whole units may be gathering when a step is over
  plan::FetchOrder order_;
  GatheredUnits gathered_;
  WholeUnits whole_;
  bool prefetches_;  // there are sharded units, and a bound for fetching them ahead
};

}  // namespace strata::engine
