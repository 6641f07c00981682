// The units that every rank holds whole, after their shards have changed: their refresh, which
// brings everybody's new shards into each rank's flat buffers.
//
// A unit is complete, or its refresh runs. A refresh may run on when a step is over, beside the
// next forward: then the parameters' readers are told to await() it, and who needs the unit calls
// complete().
//
// Threads: complete(), complete_all() and is_complete() may be called by any thread, beside all
// else, such as one that averages weights while another trains. One complete() runs at a time; it
// queues a wait of the compute stream, or waits itself where the collectives do that on the host.
// All else: one thread at a time. Ownership: owns the works. Errors:
// CommError from the collectives; a unit whose refresh failed throws it again at each complete().
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

  // Starts to refresh a complete unit; where gathers are collectives, with all ranks.
  void start(int unit);
  // Whether start() came for it since the last end() or abandon().
  bool started(int unit) const;
  // All units that must be refreshed have started. They are complete when this returns, or readers
  // await them where `late` and they can.
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
  mutable std::mutex mutex_;  // guards slots_, and the views of these units
  std::vector<Slot> slots_;   // by unit; of sharded units unused
  std::vector<int> started_;
};

}  // namespace strata::engine
