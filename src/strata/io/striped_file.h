// One range of bytes that lies in several files, so that several drives serve it at once. It is cut
// into chunks, which go to the files in turns, to the faster ones more often: of speeds 3 and 1,
// three chunks of four lie in the first file. A transfer becomes a transfer for each run of chunks
// that is one range of a file. Threads: immutable after construction, safe everywhere. Ownership:
// owns the files; must outlive its transfers' wait(). Errors: UsageError of the constructor and for
// a range that is not in it; IoError as of IoEngine, with the path and offset of the part's file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "strata/io/io_engine.h"

namespace strata::io {

// A file of its own on some drive. Speeds are relative, in any unit.
struct StripePart {
  File file;
  double speed = 1;
};

class StripedFile {
 public:
  // Takes the space in every file that is shorter than its share. `chunk`: a multiple of
  // File::kDirectBlock where transfers go past the page cache.
  StripedFile(std::vector<StripePart> parts, Bytes bytes, Bytes chunk = 4_MiB);

  Bytes size() const { return bytes_; }
  // What of it the file at a place holds, in whole chunks.
  Bytes share_of(std::size_t part) const;

  std::unique_ptr<Transfer> read(IoEngine& io, Bytes offset, std::span<std::byte> target) const;
  std::unique_ptr<Transfer> write(IoEngine& io, Bytes offset,
                                  std::span<const std::byte> source) const;

 private:
  // A run of bytes that is one range of a file.
  struct Run {
    std::size_t part;
    Bytes offset;  // in the part's file
    Bytes begin;   // relative to the transfer
    Bytes bytes;
  };
  // Which part has a chunk of a round, and how many of that part's are before it.
  struct Turn {
    std::size_t part;
    std::int64_t before;
  };
  std::vector<Run> runs_of(Bytes offset, Bytes bytes) const;

  std::vector<StripePart> parts_;
  std::vector<std::int64_t> chunks_a_round_;  // of each part
  std::vector<Turn> round_;                   // the order of chunks, again and again
  Bytes bytes_;
  Bytes chunk_;
};

}  // namespace strata::io
