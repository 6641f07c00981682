// What a StateStore has moved, for reports: counted from the store's beginning, so that what a step
// or a run moved is the difference of two. `written` of the whole is what a drive wears by.
// A value; safe everywhere.
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

// What was written to a folder since the start, whoever asked for it: what its drive wears by.
struct DriveWear {
  std::string folder;
  Bytes written;
};

}  // namespace strata::offload
