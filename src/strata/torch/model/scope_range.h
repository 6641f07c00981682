// Reports the time of one scope's forward or backward: as a span of the engine's recorder if the
// step is timed, and as a range of torch's profiler if that is on ("strata.forward
// model.layers.3"). If neither is on, it makes nothing.
// Threads: one at a time; one thread may begin a range and another end it. Ownership: if a range is
// destroyed without end(), the profiler's range ends and the recorder gets no span.
#pragma once

#include <ATen/record_function.h>

#include <memory>

#include "strata/engine/record/step_recorder.h"

namespace strata::torch {

class ScopeRange {
 public:
  ScopeRange() = default;  // reports nothing
  // `label`: one of the recorder's labels.
  ScopeRange(engine::StepRecorder& recorder, engine::Activity activity, int label);
  void end(engine::StepRecorder& recorder);

  // Whether the recorder or the profiler is on now.
  static bool watched(const engine::StepRecorder& recorder) {
    return recorder.timing() || at::hasCallbacks();
  }

 private:
  engine::StepRecorder::Recording recording_;
  std::unique_ptr<at::RecordFunction> profiled_;
};

}  // namespace strata::torch
