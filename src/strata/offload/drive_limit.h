// How fast a drive is: 8 to 32 MiB written past the end of what a store has there, and read back,
// some transfers at once as the store does it. What it is for is to be compared with: so it takes
// some hundredths of a second, and tells what the drive does for a moment. A drive that has a cache
// of its own, or a budget of bursts, may not keep that up; and while others use it, their share is
// missing. Threads: one. Memory: some megabytes while it runs. Errors: OutOfMemoryError where the
// drive is full; IoError.
#pragma once

#include "strata/base/units.h"
#include "strata/offload/block_file.h"

namespace strata::offload {

struct DriveLimit {
  double read_gb_per_s = 0.0;  // 0: not measured
  double write_gb_per_s = 0.0;
};

// `begin`: a multiple of 4 KiB from where on the file has nothing that anybody wants.
DriveLimit measure_drive(BlockFile& file, Bytes begin);

}  // namespace strata::offload
