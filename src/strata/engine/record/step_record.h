// The record of one training step, as plain values: counts of every step, and spans, with their
// times, of steps that were timed; those of drives, whose times cost nothing, of every step. Made
// by StepRecorder, read by the report and by the timeline. Threads: values. Units: seconds, by the
// clock of the device where the work ran (on the CPU device the host's; of drives always); bytes of
// whole units, of which (ranks - 1) / ranks come from, or go to, other ranks; of copies and of
// drives the bytes that go over the link.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "strata/base/units.h"
#include "strata/offload/store_counts.h"

namespace strata::engine {

enum class Activity : std::uint8_t {
  // Phases of a step, on the compute stream.
  kForwardPass,
  kBackwardPass,
  kUpdate,
  // Spans of one scope, on the compute stream. Scopes are nested.
  kForward,
  kRecompute,  // a forward within a backward pass: activation checkpointing
  kBackward,
  // The compute stream waits for a unit.
  kGatherWait,
  kReduceWait,
  kLazyGatherWait,
  // The compute stream waits for copies between the host and the device.
  kCopyWait,
  // Spans at a step's end, on the compute stream.
  kNorm,  // the norm of the gradients, and the ranks' agreement
  kOptimizer,
  // A unit's bytes on their way, beside the compute stream.
  kGather,
  kLazyGather,  // a gather of a unit that stays whole
  kReduce,
  // A reduction between peers waits until the peers' contributions are ready.
  kPeersReady,
  // Traffic of this rank's links, each copy or transfer by itself (offload/link_watch.h).
  kUpload,
  kDownload,
  kDriveRead,
  kDriveWrite,
};
inline constexpr int kActivityCount = 20;

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
  std::int64_t host_waits = 0;          // of the engine for the device (device/device.h)
  Bytes uploaded;                       // copied from the host to a device that is apart from it
  Bytes downloaded;
  offload::StoreCounts stores;  // of all stores: weights and optimizer states
};

struct StepRecord {
  std::int64_t number = 0;  // from 1
  bool timed = false;       // has spans
  double seconds = 0.0;     // from its first forward to the end of its update
  double epoch = 0.0;       // of its begin: seconds since 1970
  StepCounts counts;
  // In the order of their begins; then those of drives, in the order in which the store saw their
  // ends. A transfer that began before the step, and ended in it, has a begin below 0.
  std::vector<StepSpan> spans;
};

}  // namespace strata::engine
