// Reads files of a checkpoint through a ring, from front to back, several reads ahead, and compares
// each block with its checksum in the manifest. RangeSource is the Source of all pipelines that
// read files.
//
// Threads: one thread; CheckpointFiles is immutable. Ownership: sources borrow files, ranges and
// the I/O engine; CheckpointFiles borrows the manifest. Errors: IoError for files that are missing
// or cannot be read; FormatError for files and bytes that are not what was written.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/checkpoint/pipeline.h"
#include "strata/format/manifest.h"
#include "strata/io/io_engine.h"

struct XXH3_state_s;  // of xxhash.h

namespace strata::checkpoint {

using format::end_of;
using format::owners_of;

// Whether files are read through the page cache or past it. Cached pages come at the speed of
// memory. Others are read faster past the cache where the drive is faster than the copies through
// it, and slower where the cache's reading ahead helps; ReadProbe measures which. Pure; safe
// everywhere.
using io::ReadWay;

// Absent: not known.
struct ReadFigures {
  bool direct_offered = false;        // by the file system
  std::optional<double> cached = {};  // share of the bytes that is in the page cache, from samples
  // A probe measured them on bytes that were not in the page cache.
  std::optional<double> buffered_gb_per_s = {};
  std::optional<double> direct_gb_per_s = {};
};

struct ReadChoice {
  bool direct = false;
  std::string reason;
  ReadFigures figures;
};

// From this share on, a probe cannot change the choice.
inline constexpr double kCachedEnough = 0.9;
// How much faster direct reads have to be: they leave nothing in the cache for the next start.
inline constexpr double kDirectGain = 1.1;

// Whether choose_read() needs the figures of a probe.
bool wants_probe(ReadWay asked, const ReadFigures& figures);
ReadChoice choose_read(ReadWay asked, const ReadFigures& figures);

// Some of the bytes of the file at a place of a list.
struct FileRange {
  std::size_t file = 0;
  Bytes offset;
  Bytes bytes;
};

// Both ways to a file; `direct` is what File::direct() gave. Files that no range names may be null.
struct ReadableFile {
  const io::File* buffered = nullptr;
  const io::File* direct = nullptr;
};

// Bytes that are not what was written, or cannot be read.
struct WrongRange {
  std::size_t file = 0;
  Bytes begin;
  Bytes end;
  std::string problem;
  std::exception_ptr cause = nullptr;  // why it cannot be read; null: its checksum differs
};

struct Verification {
  std::span<const format::ManifestFile> files;  // as ranges name them
  bool checksums = true;                        // false: only what cannot be read is wrong
  // Called for every wrong block and every piece that cannot be read. Where it returns, reading
  // goes on.
  std::function<void(const WrongRange&)> wrong;
};

struct ReadOptions {
  bool direct = false;  // past the page cache
  // Modulo this, content begins in memory where it does in the file, and pieces are cut there.
  Bytes aligned = 1_B;
  // Reads go on to the end of a block, or of the file, where the buffer has room.
  Bytes block = 1_B;
  // Blocks that are read whole, in pieces that follow each other, are verified. Null: nothing is.
  const Verification* verify = nullptr;
};

class RangeSource : public Source {
 public:
  // `buffer`: bytes of the ring's buffers. Cuts ranges that are larger than one.
  RangeSource(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
              io::IoEngine& io, Bytes buffer, const ReadOptions& options = {});

  bool next(Piece& piece) override;
  std::unique_ptr<io::Transfer> fill(Piece& piece, std::span<std::byte> buffer) override;
  void filled(const Piece& piece) override;
  void failed(const Piece& piece) override;

 private:
  void compare(std::size_t file, Bytes begin, Bytes end);

  std::span<const ReadableFile> files_;
  std::span<const FileRange> ranges_;
  io::IoEngine& io_;
  Bytes most_;  // of a piece
  ReadOptions options_;
  std::size_t range_ = 0;
  Bytes done_;  // of the range
  // The block that is being verified:
  std::shared_ptr<XXH3_state_s> sum_;
  bool whole_ = false;      // all of it came up to `reached_`
  std::size_t summed_ = 0;  // its file
  Bytes reached_{-1};
};

// The ranges, grown to whole blocks of their files and joined where they touch. In order.
std::vector<FileRange> whole_blocks(std::span<const FileRange> ranges,
                                    std::span<const format::ManifestFile> files);

// A file of a checkpoint in `folder`, of the size that it was written with, and no link out of it.
io::File open_file(const std::string& folder, const format::ManifestFile& file);

// Open files of a checkpoint: those that are read, since the limit of descriptors is near where
// many ranks have saved.
class CheckpointFiles {
 public:
  // `wanted`: places in the manifest; nullopt: all.
  CheckpointFiles(const std::string& folder, const format::Manifest& manifest,
                  const std::optional<std::set<std::size_t>>& wanted = std::nullopt);

  // By places in the manifest; null: not open.
  std::vector<const io::File*> pointers() const;
  // The same, for sources that read through the page cache.
  std::vector<ReadableFile> readable() const;
  // Compares all checksums; calls fail().
  Verification verification() const;
  // The largest block of checksums: whole blocks of every file lie in it.
  Bytes block() const;
  // The cause, or a FormatError that names the file, the bytes and their tensors.
  [[noreturn]] void fail(const WrongRange& wrong) const;

 private:
  const format::Manifest& manifest_;
  std::vector<std::optional<io::File>> files_;
};

// Finds the figures for choose_read(): samples which pages of the ranges are cached, and where that
// can decide times pieces that are not, half of them buffered and half direct, through the ring
// that the reading itself will use. Each process probes for itself: its ranges are its own, and
// ranks of a host that probe at once share the drive as they do when they read at once.
struct ReadProbeOptions {
  int samples = 64;      // pages
  Bytes piece = 16_MiB;  // a multiple of io::File::kDirectBlock
  int pieces = 2;        // each way
  // Nothing is timed where less is to be read: the pieces would be too large a part of it.
  Bytes least = 512_MiB;
};

class ReadProbe {
 public:
  // `ranges` are what will be read; files that none of them names may be null. Borrows both.
  ReadProbe(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
            const ReadProbeOptions& options = {});

  // Times reads only where the choice depends on it. The ring's buffers are whole blocks of direct
  // transfers.
  ReadChoice choose(ReadWay asked, io::IoEngine& io, TransferRing& ring) const;

  // The steps of it.
  ReadFigures look() const;
  void time_reads(ReadFigures& figures, io::IoEngine& io, TransferRing& ring) const;

 private:
  std::vector<format::FileOffset> samples() const;
  std::vector<format::FileOffset> cold_pieces() const;

  std::span<const ReadableFile> files_;
  std::span<const FileRange> ranges_;
  ReadProbeOptions options_;
  Bytes total_;
};

// Takes from pieces of files what belongs to extents. Both come by file and offset; pieces are cut
// between elements.
class ExtentSink : public Sink {
 public:
  // Gets elements of extents[extent], from its byte `at` on.
  using Take = std::function<void(std::size_t extent, Bytes at, std::span<const std::byte> bytes)>;
  // Borrows the extents.
  ExtentSink(std::span<const format::ManifestRange> extents, Take take_elements)
      : extents_(extents), take_elements_(std::move(take_elements)) {}
  std::unique_ptr<io::Transfer> take(const Piece& piece) override;

 private:
  std::span<const format::ManifestRange> extents_;
  Take take_elements_;
  std::size_t next_ = 0;
};

}  // namespace strata::checkpoint
