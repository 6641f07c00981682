// The units that every rank holds whole, after their shards have changed: their refresh, which
// brings everybody's new shards into each rank's flat buffers.
//
// A unit is complete, or its refresh runs. A refresh may run on when a step is over, beside the
// next forward: then the parameters' readers are told to await() it, and who needs the unit calls
// complete(). Peers may still read this rank's slices when it is complete here, so whoever lets a
// script write weights calls wait_for_readers() first.
//
// Threads: complete(), complete_all(), wait_for_readers() and is_complete() may be called by any
// thread, beside all else, such as one that averages weights while another trains. One complete()
// runs at a time; it queues a wait of the compute stream, or waits itself where the collectives do
// that on the host. All else: one thread at a time. Ownership: owns the works. Errors: CommError
// from the collectives; a unit whose refresh failed throws it again at each complete().
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

class WholeUnits {
 public:
  WholeUnits(const std::vector<Unit>& units, comm::Collectives& collectives, ParameterViews& views,
             StepRecorder& recorder);
  ~WholeUnits();
  WholeUnits(const WholeUnits&) = delete;
  WholeUnits& operator=(const WholeUnits&) = delete;

  bool is_complete(int unit) const;
  // What the compute stream of this thread gets from now on finds the unit's values.
  void complete(int unit);
  void complete_all();
  // What the compute stream of this thread gets from now on comes after what peers read of this
  // rank's slices in the last refresh. At most once a refresh: later calls return at once.
  void wait_for_readers();

  // Starts to refresh a complete unit; where gathers are collectives, with all ranks.
  void start(int unit);
  // Whether start() came for it since the last end() or abandon().
  bool started(int unit) const;
  // Of the shard group: all units that must be refreshed have started. They are complete when this
  // returns, also on peers, or readers await them where `late` and they can.
  void end(bool late);
  // Completes what has started, and forgets it: the shards are no good.
  void abandon();

  // The parameters of complete units lose their memory, and point at it again.
  void detach();
  void attach();

 private:
  struct Slot {
    std::unique_ptr<comm::Work> work;  // null: complete
    StepRecorder::Recording recording;
    bool awaited = false;  // readers were told to ask for it
  };
  void finish(int unit, Slot& slot);  // the mutex is held
  Slot& of(int unit) { return slots_[static_cast<std::size_t>(unit)]; }

  const std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  ParameterViews& views_;
  StepRecorder& recorder_;
  mutable std::mutex mutex_;  // guards slots_, readers_, and the views of these units
  std::vector<Slot> slots_;   // by unit; of sharded units unused
  std::vector<int> started_;
  std::unique_ptr<comm::Work> readers_;  // of the last refresh; null: they have finished
};

}  // namespace strata::engine
