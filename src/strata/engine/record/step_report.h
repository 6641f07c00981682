// The record of one training step, as plain values, and its report for users. A record has counts
// of every step, and spans, with their times, of steps that were timed; those of drives, whose
// times cost nothing, of every step. Made by StepRecorder, read by the report and by the timeline.
// Threads: values. Units: seconds, by the clock of the device where the work ran (on the CPU device
// the host's; of drives always); bytes of whole units, of which (ranks - 1) / ranks come from, or
// go to, other ranks; of copies and of drives the bytes that go over the link.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "strata/base/units.h"
#include "strata/offload/state_store.h"

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
  // Traffic of this rank's links, each copy or transfer by itself (offload/state_store.h).
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
  std::int64_t host_waits = 0;          // of the engine for the device (device/host_waits.h)
  Bytes uploaded;                       // copied from the host to a device that is apart from it
  Bytes downloaded;
  // Sums for weights and optimizer states; the wait in fetch() is for reads and for room.
  offload::StoreCounts stores;
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

// The traffic of one of this rank's links in a step, if values are offloaded. GB/s (1e9) are those
// of bytes as they go over the link, in the time in which at least one copy or transfer ran.
//
// The limit is the best speed that a short measurement found: for copies one way at a time
// (measure_link()), for the drives behind all stores together (offload/block_file.h); or the best
// speed of a reported step, if that is more. Ranks that share a link or a drive measure beside each
// other's traffic, and the sum may exceed the link's speed. A kernel that works on the host's
// memory counts as a copy of the bytes that it reads and writes, and is slower than a copy.
struct LinkUse {
  offload::Link link{};
  Bytes bytes;  // of the step
  // The seconds in which at least one ran. Absent for copies if the step was not timed. For a
  // drive, those of transfers that ended in the step.
  std::optional<double> seconds{};
  std::optional<double> gb_per_s{};        // absent: not known, or none ran
  std::optional<double> limit_gb_per_s{};  // absent: not measured
  std::optional<double> of_limit() const {
    if (!gb_per_s || !limit_gb_per_s) return std::nullopt;
    return *gb_per_s / *limit_gb_per_s;
  }
};

// Elements that a lane of the update has updated (optimize/native_optimizer.h), and its seconds.
struct LaneTime {
  Numel numel;
  double seconds = 0.0;
};
struct LaneTimes {
  LaneTime device;
  LaneTime host;
};

struct LinkReport {
  std::vector<LinkUse> uses;  // of the existing links
  // The compute stream's wait for copies of states and gradients; absent: not timed. Its wait for
  // weights counts as a wait for a gather.
  std::optional<double> copy_wait;
  std::vector<offload::DriveWrites> drive_writes;  // of each folder, since the start
  std::optional<LaneTimes> lanes;  // of the last update that is over; absent: it had no two lanes
  Bytes cached{};                  // now: state of the host in free memory of the device
};

// Without limits and drive_writes, of a rank that has these links.
LinkReport make_link_report(const StepRecord& record, bool copies, bool drives);

// GB/s (1e9) are those of the bytes that crossed the links of this rank, (ranks - 1) / ranks of the
// unit, in the time in which at least one such transfer ran.
struct StepTransfers {
  double seconds = 0.0;   // in which at least one was under way
  double exposed = 0.0;   // seconds in which the compute stream waited for one
  double gb_per_s = 0.0;  // 0 in a world of one rank
};

struct StepTimes {
  double forward = 0.0;   // from a forward's begin to its backward
  double backward = 0.0;  // from its begin to its end, recomputation included
  double update = 0.0;    // from the end of the last backward to that of the step
  double norm = 0.0;      // of that: the gradients' norm, and the ranks' agreement
  double optimizer = 0.0;
  StepTransfers gather;
  StepTransfers reduce;
  StepTransfers refresh;
  double exposed() const { return gather.exposed + reduce.exposed + refresh.exposed; }
};

// For users.
struct StepReport {
  std::int64_t step = 0;  // from 1
  double seconds = 0.0;
  StepCounts counts;
  std::optional<StepTimes> times;     // where it was timed
  std::optional<LinkReport> links{};  // where something is offloaded
};

StepReport make_step_report(const StepRecord& record, int world_size);

}  // namespace strata::engine
