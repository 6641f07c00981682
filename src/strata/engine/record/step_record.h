// What one training step did, as plain values: counts of every step, and spans, with their times,
// of steps that were timed. Made by StepRecorder, read by the report and by the timeline.
// Threads: values. Units: seconds, by the clock of the device where the work ran (on the CPU device
// the host's); bytes of whole units, of which (ranks - 1) / ranks come from, or go to, other ranks.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "strata/base/units.h"

namespace strata::engine {

enum class Activity : std::uint8_t {
  // Phases of a step, on the compute stream.
  kForwardPass,
  kBackwardPass,
  kUpdate,
  // Of one scope, on the compute stream. Scopes lie within each other.
  kForward,
  kRecompute,  // a forward within a backward pass: activation checkpointing
  kBackward,
  // The compute stream waits for a unit.
  kGatherWait,
  kReduceWait,
  kRefreshWait,
  // Of a step's end, on the compute stream.
  kNorm,  // of the gradients, and the ranks' meeting
  kOptimizer,
  // A unit's bytes on their way, beside the compute stream.
  kGather,
  kRefresh,  // a gather of a unit that stays whole
  kReduce,
  // Of a reduction between peers: until theirs is ready.
  kPeersReady,
};
inline constexpr int kActivityCount = 15;

std::string_view name_of(Activity activity);

struct StepSpan {
  Activity activity{};
  int label = -1;  // of StepRecorder::label_name(); -1: none
  Bytes bytes;
  double begin = 0.0;  // since the step's begin
  double end = 0.0;
};

struct StepCounts {
  std::int64_t gathers = 0;  // of units that do not stay whole
  std::int64_t reductions = 0;
  std::int64_t refreshes = 0;
  Bytes gathered;
  Bytes reduced;
  Bytes refreshed;
  // Uses of units that do not stay whole: gathered still, under way, or begun only then.
  std::int64_t kept = 0;
  std::int64_t prefetch_hits = 0;
  std::int64_t late_fetches = 0;
  std::int64_t device_allocations = 0;  // by the engine
  std::int64_t host_waits = 0;          // of the engine for the device (device/host_waits.h)
};

struct StepRecord {
  std::int64_t number = 0;  // from 1
  bool timed = false;       // has spans
  double seconds = 0.0;     // from its first forward to the end of its update
  double epoch = 0.0;       // of its begin: seconds since 1970
  StepCounts counts;
  std::vector<StepSpan> spans;  // in the order in which they were begun
};

}  // namespace strata::engine
