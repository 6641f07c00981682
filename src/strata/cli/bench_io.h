// How fast drives are read and written past the page cache, as `strata bench-io` shows it: a file
// in each folder, read, written, and both at once, with blocks of several sizes and queues of
// several depths, from front to back, into and out of registered memory; and what to write into the
// configuration. Threads: one, beside those of the IoEngine. Memory: two blocks for each place of
// the deepest queue. The files have no names, so that they are gone when they are closed, even if
// the process is killed. Errors: UsageError for a folder that is missing, not writable or too full,
// and for sizes that do not go together; IoError.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "strata/cli/console.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct DriveRequest {
  std::vector<std::string> paths;
  Bytes size = 1_GiB;  // of the file; each pass moves as much
  std::vector<Bytes> blocks{256_KiB, 1_MiB, 4_MiB};
  std::vector<int> depths{8, 32};
  io::EngineKind engine = io::EngineKind::kAuto;
};

// GB/s with one size of blocks and one depth.
struct DriveFigures {
  Bytes block;
  int depth = 0;
  double read = 0;
  double write = 0;
  double both = 0;  // together, half of the bytes each
};

// The figures of each drive.
using DriveSpeeds = std::vector<std::vector<DriveFigures>>;

// Which figures to take, of drives that have all been measured alike: those by which a byte is read
// and written soonest on the drive that loses most; and of those that are about as good, the ones
// that hold least memory.
std::size_t best_of(const DriveSpeeds& drives);

Report measure_drives(const DriveRequest& request, const std::shared_ptr<memory::Ledger>& ledger,
                      Console& console);

}  // namespace strata::cli
