// Spreads one range of bytes over several files, so that several drives serve it at once. The range
// is cut into chunks, which go to the files in turns, more often to the faster ones: with speeds 3
// and 1, three chunks of four lie in the first file. The offset of a byte depends on the speeds
// alone, so the range may grow. Pure arithmetic; immutable, safe everywhere. Errors: UsageError
// from the constructor.
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
  // The part that has a chunk of a round, and the number of that part's chunks before it.
  struct Turn {
    std::size_t part;
    std::int64_t before;
  };

  std::vector<std::int64_t> chunks_a_round_;  // of each part
  std::vector<Turn> round_;                   // the order of chunks, again and again
  Bytes chunk_;
};

// Several transfers as one. wait() waits for all, and throws the first error in their order.
std::unique_ptr<Transfer> joined(std::vector<std::unique_ptr<Transfer>> transfers);

}  // namespace strata::io
