// The report of a step for users: its seconds and counts, and, if it was timed, how long the device
// computed, how long it waited for bytes (the exposed communication), and how fast they came.
// Threads: values. Units: seconds; bytes of whole units; GB/s (1e9) of the bytes that crossed the
// links of this rank, (ranks - 1) / ranks of the unit, in the time in which at least one such
// transfer ran.
#pragma once

#include <cstdint>
#include <optional>

#include "strata/engine/record/link_report.h"
#include "strata/engine/record/links.h"
#include "strata/engine/record/step_record.h"
#include "strata/engine/record/step_recorder.h"

namespace strata::engine {

struct StepTransfers {
  double seconds = 0.0;   // in which at least one was under way
  double exposed = 0.0;   // seconds in which the compute stream waited for one
  double gb_per_s = 0.0;  // 0 in a world of one rank
};

struct StepTimes {
  double forward = 0.0;   // from a forward's begin to its backward
  double backward = 0.0;  // from its begin to its end, recomputation included
  double update = 0.0;    // from the end of the last backward to that of the step
  double norm = 0.0;      // of that: the gradients' norm, and the ranks' meeting
  double optimizer = 0.0;
  StepTransfers gather;
  StepTransfers reduce;
  StepTransfers refresh;
  double exposed() const { return gather.exposed + reduce.exposed + refresh.exposed; }
};

struct StepReport {
  std::int64_t step = 0;  // from 1
  double seconds = 0.0;
  StepCounts counts;
  std::optional<StepTimes> times;     // where it was timed
  std::optional<LinkReport> links{};  // where something is offloaded
};

StepReport make_step_report(const StepRecord& record, int world_size);
// Engine::step_report(). `links`: null where nothing is offloaded.
std::optional<StepReport> make_step_report(StepRecorder& recorder, bool wait, int world_size,
                                           Links* links = nullptr);

}  // namespace strata::engine
