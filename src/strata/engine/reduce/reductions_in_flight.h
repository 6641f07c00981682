// Reductions that have started and are not settled, in the order of their starts, with the flat
// gradient buffers that they read. Buffers are given back as soon as their bytes were read;
// results are folded into the gradient shards in the order of starts.
//
// Threads: one thread at a time. Ownership: owns the works and their buffers; borrows the rest.
// Errors: CommError of the reductions; DeviceError.
#pragma once

#include <deque>
#include <memory>

#include "strata/comm/collectives.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_buffers.h"
#include "strata/engine/reduce/gradient_shards.h"

namespace strata::engine {

class ReductionsInFlight {
 public:
  ReductionsInFlight(GradientBuffers& buffers, GradientShards& shards, StepRecorder& recorder)
      : buffers_(buffers), shards_(shards), recorder_(recorder) {}

  // `buffer`: the memory that the reduction reads; null: none of this rank's.
  void add(int unit, GradientBuffers::Buffer buffer, std::unique_ptr<comm::Work> work,
           StepRecorder::Recording recording);
  // Lets the collectives continue with the started reductions. Where ranks pull, this rank does
  // that work, and its peers would otherwise wait for it until its next call.
  void progress();
  // Waits until buffers hold at most `at_most`, and settles the ended reductions.
  void free_buffers(Bytes at_most);
  // Settles all reductions up to this unit's, if that is under way: its shard may be added to then.
  void finish(int unit);
  // Waits for all, and settles them.
  void finish();
  // Waits for all, and drops their results and errors.
  void abandon();

 private:
  struct Pending {
    int unit = -1;
    GradientBuffers::Buffer buffer;  // null: given back, while the result is on its way
    std::unique_ptr<comm::Work> work;
    StepRecorder::Recording recording;  // of `work`
  };
  void settle_front();

  GradientBuffers& buffers_;
  GradientShards& shards_;
  StepRecorder& recorder_;
  std::deque<Pending> pending_;
  Bytes held_;  // by buffers of pending_
};

}  // namespace strata::engine
