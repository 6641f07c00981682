// Reads ranges of a checkpoint's files from front to back, several reads ahead, and checks every
// block that lies wholly in a range against the checksum that the manifest has of it. Threads: one.
// Memory: the ring. Errors: IoError, unless somebody takes what is wrong.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "strata/cli/buffer_ring.h"
#include "strata/format/manifest.h"
#include "strata/io/read_probe.h"

namespace strata::cli {

// Bytes that are not what was written, or cannot be read.
struct WrongRange {
  std::size_t file = 0;
  Bytes begin;
  Bytes end;
  std::string problem;
};

struct CheckedReading {
  std::vector<const io::File*> files;  // by the manifest's; those that no range names may be null
  std::span<const format::ManifestFile> sums;
  std::span<const io::FileRange> ranges;  // by file and offset, none over another
  bool verify = true;
  // Of every piece of a range, in order; before the checksum of its last block is known. Pieces are
  // cut at multiples of 16 bytes of a file, and lie in memory as they do in it.
  std::function<void(std::size_t file, Bytes offset, std::span<const std::byte> bytes)> take;
  // Of every block that is wrong, and every piece that cannot be read. Empty: reading ends with an
  // IoError; what is wrong otherwise goes unheard.
  std::function<void(const WrongRange&)> wrong;
};

// `ring`: its buffers hold 32 bytes at least.
void read_checked(const CheckedReading& reading, io::IoEngine& io, BufferRing& ring);

// The ranges, grown to whole blocks of their files and joined where they touch. In order.
std::vector<io::FileRange> whole_blocks(std::span<const io::FileRange> ranges,
                                        std::span<const format::ManifestFile> files);

}  // namespace strata::cli
