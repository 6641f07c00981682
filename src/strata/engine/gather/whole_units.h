// The units that every rank holds whole: a lazy all-gather copies every rank's new shards into each
// rank's flat buffers after they have changed. It may continue after the step, beside the next
// forward. Then this class asks the parameters' readers to wait (ParameterViews::await()), and code
// that needs the unit calls complete(). Peers may still read this rank's slices then, so code that
// lets a script write weights calls wait_for_readers() first.
//
// Threads: any thread may call complete(), complete_all(), wait_for_readers() and is_complete(),
// beside all other calls, such as a thread that averages weights while another one trains. One
// complete() runs at a time; it queues a wait of the compute stream, or waits itself where the
// collectives wait on the host. All other calls: one thread at a time. Ownership: owns the works.
// Errors: CommError from the collectives; if a gather failed, each complete() of the unit throws
// the error again.
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

  bool is_complete(int unit) const {
    const std::lock_guard lock(mutex_);
    return nth(slots_, unit).work == nullptr;
  }
  // Work that this thread queues on the compute stream from now on finds the unit's values.
  void complete(int unit) {
    const std::lock_guard lock(mutex_);
    finish(unit, of(unit));
  }
  void complete_all();
  // Work that this thread queues on the compute stream from now on runs after peers have read this
  // rank's slices. Waits at most once for each end().
  void wait_for_readers();

  // Starts to gather a complete unit again; where gathers are collectives, with all ranks.
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
  ParameterViews& views_;
  StepRecorder& recorder_;
  mutable std::mutex mutex_;  // guards slots_, readers_, and the views of these units
  std::vector<Slot> slots_;   // by unit; of sharded units unused
  std::vector<int> started_;
  std::unique_ptr<comm::Work> readers_;  // of the last gathers; null: they have finished
};

}  // namespace strata::engine
