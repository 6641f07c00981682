// The time of one scope's forward or backward, as others see it: a span of the engine's recorder
// where the step is timed, and a range of torch's profiler where that is on ("strata.forward
// model.layers.3"). Where neither is, nothing is made.
// Threads: one at a time; begin and end may be of different threads. Ownership: a range that goes
// without end() is over for the profiler, and unknown to the recorder.
#pragma once

#include <ATen/record_function.h>

#include <memory>

#include "strata/engine/record/step_recorder.h"

namespace strata::torch {

class ScopeRange {
 public:
  ScopeRange() = default;  // of nothing
  // `label`: of the recorder.
  ScopeRange(engine::StepRecorder& recorder, engine::Activity activity, int label);
  void end(engine::StepRecorder& recorder);

  // Whether anybody looks now.
  static bool watched(const engine::StepRecorder& recorder) {
    return recorder.timing() || at::hasCallbacks();
  }

 private:
  engine::StepRecorder::Recording recording_;
  std::unique_ptr<at::RecordFunction> profiled_;
};

}  // namespace strata::torch
