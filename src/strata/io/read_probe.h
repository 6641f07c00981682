// Looks at files that are about to be read, and times both ways of reading some of them where that
// can decide (read_choice.h): a sample of their pages in the page cache, and pieces that were not
// there, each in another place, half of them buffered and half direct, by the engine and into the
// buffers that the reading itself will use. Each process looks for itself: the ranges, and so the
// files and what of them is cached, are its own, and ranks of a host that probe at once share the
// drive as they do when they read at once. Threads: one thread. Memory: the caller's buffers.
// Errors: IoError of a read.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "strata/io/io_engine.h"
#include "strata/io/read_choice.h"

namespace strata::io {

// Some of the bytes of the file at a place of a list.
struct FileRange {
  std::size_t file = 0;
  Bytes offset;
  Bytes bytes;
};

// Both ways to a file; `direct` is what File::direct() gave.
struct ReadableFile {
  const File* buffered = nullptr;
  const File* direct = nullptr;
};

struct ReadProbeOptions {
  int samples = 64;      // pages
  Bytes piece = 16_MiB;  // a multiple of File::kDirectBlock
  int pieces = 2;        // each way
  // Nothing is timed where less is to be read: the pieces would be too much of it.
  Bytes least = 512_MiB;
};

class ReadProbe {
 public:
  // `ranges` are what will be read; files that none of them names may be null. Borrows both.
  ReadProbe(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
            const ReadProbeOptions& options = {});

  // Looks at the page cache at once; times reads only where the choice depends on it. `buffers`
  // lie at blocks and are whole blocks.
  ReadChoice choose(ReadWay asked, IoEngine& io,
                    std::span<const std::span<std::byte>> buffers) const;

  // The steps of it.
  ReadFigures look() const;
  void time_reads(ReadFigures& figures, IoEngine& io,
                  std::span<const std::span<std::byte>> buffers) const;

 private:
  struct Place {
    std::size_t file;
    Bytes offset;
  };
  std::vector<Place> samples() const;
  std::vector<Place> cold_pieces() const;

  std::span<const ReadableFile> files_;
  std::span<const FileRange> ranges_;
  ReadProbeOptions options_;
  Bytes total_;
};

}  // namespace strata::io
