// The bytes and transfers of a StateStore, for reports. They count from the store's start, so the
// difference of two gives a step's or a run's share. `written` is the total of bytes written to the
// drive. A value; safe everywhere.
#pragma once

#include <cstdint>
#include <string>

#include "strata/base/units.h"

namespace strata::offload {

struct StoreCounts {
  std::int64_t parts = 0;        // lent
  std::int64_t parts_ready = 0;  // of them: those that were in memory when they were asked for
  std::int64_t reads = 0;        // transfers from the drive, also of what was read ahead in vain
  std::int64_t writes = 0;       // transfers to it
  Bytes read;                    // whole pages
  Bytes written;                 // whole pages
  double seconds_waited = 0.0;   // in fetch(): for reads, and for room in memory

  StoreCounts operator+(const StoreCounts& other) const {
    return {parts + other.parts,
            parts_ready + other.parts_ready,
            reads + other.reads,
            writes + other.writes,
            read + other.read,
            written + other.written,
            seconds_waited + other.seconds_waited};
  }
  StoreCounts operator-(const StoreCounts& before) const {
    return {parts - before.parts,
            parts_ready - before.parts_ready,
            reads - before.reads,
            writes - before.writes,
            read - before.read,
            written - before.written,
            seconds_waited - before.seconds_waited};
  }
};

// All bytes written to a folder since the start, by any caller. These bytes wear the drive.
struct DriveWrites {
  std::string folder;
  Bytes written;
};

}  // namespace strata::offload
