// How one range of bytes lies in several files, so that several drives serve it at once. It is cut
// into chunks, which go to the files in turns, to the faster ones more often: of speeds 3 and 1,
// three chunks of four lie in the first file. Where a byte lies depends on nothing but the speeds,
// so that the range may grow. Arithmetic alone; immutable, safe everywhere.
// Errors: UsageError of the constructor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "strata/base/units.h"
#include "strata/io/io_engine.h"

namespace strata::io {

class Striping {
 public:
  // `speeds`: the relative speed of each part, in any unit. `chunk`: a multiple of
  // File::kDirectBlock where transfers bypass the page cache.
  explicit Striping(const std::vector<double>& speeds, Bytes chunk = 1_MiB);

  std::size_t parts() const { return chunks_a_round_.size(); }
  // The bytes of [0, `bytes`) that lie in the part.
  Bytes share_of(std::size_t part, Bytes bytes) const;

  // A run of bytes that is one range of a part.
  struct Run {
    std::size_t part;
    Bytes offset;  // in the part
    Bytes begin;   // relative to the range
    Bytes bytes;
  };
  // The runs of [offset, offset + bytes), in order; offset is not negative.
  std::vector<Run> runs_of(Bytes offset, Bytes bytes) const;

 private:
  // Which part has a chunk of a round, and how many of that part's are before it.
  struct Turn {
    std::size_t part;
    std::int64_t before;
  };

  std::vector<std::int64_t> chunks_a_round_;  // of each part
  std::vector<Turn> round_;                   // the order of chunks, again and again
  Bytes chunk_;
};

// The transfers as one. wait() waits for all; of several failures it throws the first one's.
std::unique_ptr<Transfer> joined(std::vector<std::unique_ptr<Transfer>> transfers);

}  // namespace strata::io
