// Measures how fast a drive is: it writes 8 to 32 MiB past the end of the store's data and reads
// them back, with several transfers at once, as the store does. Reports compare a run's speed with
// the result. So the measurement takes only some hundredths of a second, and shows the drive's
// speed at that moment. A drive with a cache of its own, or with a budget for bursts, may not
// sustain it; and the share of other users is missing from it.
// Threads: one. Memory: some megabytes while it runs. Errors: OutOfMemoryError where the drive is
// full; IoError.
#pragma once

#include "strata/base/units.h"
#include "strata/offload/block_file.h"

namespace strata::offload {

struct DriveLimit {
  double read_gb_per_s = 0.0;  // 0: not measured
  double write_gb_per_s = 0.0;
};

// `begin`: a multiple of 4 KiB. The file holds no data from there on.
DriveLimit measure_drive(BlockFile& file, Bytes begin);

}  // namespace strata::offload
