// The traffic of this rank's links in a step, if values are offloaded, and the waits of the step
// for it: the link between host and device both ways, and drives both ways. Threads: values. Units:
// seconds; GB/s (1e9), of bytes as they go over the link, in the time in which at least one copy or
// transfer ran.
//
// The meaning of `of_limit`. The limit is the best speed that a short measurement found: for copies
// one way at a time (link_speed.h), for the drives behind all stores together
// (offload/drive_limit.h); or the best speed of a reported step, if that is more. So the limit is
// the speed of the link for a moment, alone. Ranks that share a link or a drive measure their own
// limits, each beside the others' traffic at that moment, and the sum may exceed the link's speed.
// A kernel that works on the host's memory counts as a copy of the bytes that it reads and writes,
// and is slower than a copy.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "strata/engine/record/step_record.h"
#include "strata/offload/block_file.h"
#include "strata/offload/link_watch.h"

namespace strata::engine {

struct LinkUse {
  offload::Link link{};
  Bytes bytes;  // of the step
  // The seconds in which at least one ran. Absent for copies if the step was not timed. For a
  // drive, those of transfers that ended in the step.
  std::optional<double> seconds;
  std::optional<double> gb_per_s;        // absent: not known, or none ran
  std::optional<double> limit_gb_per_s;  // absent: not measured
  std::optional<double> of_limit() const {
    if (!gb_per_s || !limit_gb_per_s) return std::nullopt;
    return *gb_per_s / *limit_gb_per_s;
  }
};

struct LinkReport {
  std::vector<LinkUse> uses;  // of the existing links
  // The host's wait in fetch(), for reads and for room, and the compute stream's wait for copies of
  // states and gradients (absent: not timed). Its wait for weights counts as a wait for a gather.
  double fetch_wait = 0.0;
  std::optional<double> copy_wait;
  std::int64_t parts = 0;  // that stores lent in the step
  std::int64_t parts_ready = 0;
  std::vector<offload::DriveWrites> wear;  // of each folder, since the start
};

// Without limits and wear, of a rank that has these links.
LinkReport make_link_report(const StepRecord& record, bool copies, bool drives);

}  // namespace strata::engine
