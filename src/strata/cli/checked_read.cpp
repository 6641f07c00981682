#include "strata/cli/checked_read.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/running_checksum.h"

namespace strata::cli {
namespace {

constexpr Bytes kAligned = 16_B;  // no element is larger

struct Piece {
  std::size_t file = 0;
  Bytes begin;
  Bytes end;
};

// The pieces of the ranges, one after the other.
class Pieces {
 public:
  Pieces(std::span<const io::FileRange> ranges, Bytes most) : ranges_(ranges), most_(most) {}

  std::optional<Piece> next() {
    while (range_ < ranges_.size() && done_ == ranges_[range_].bytes) {
      ++range_;
      done_ = Bytes();
    }
    if (range_ == ranges_.size()) return std::nullopt;
    const io::FileRange& range = ranges_[range_];
    const Bytes begin = range.offset + done_;
    const Bytes cut = begin + most_ - begin % kAligned;
    const Bytes end = std::min(cut, range.offset + range.bytes);
    done_ += end - begin;
    return Piece{range.file, begin, end};
  }

 private:
  std::span<const io::FileRange> ranges_;
  Bytes most_;
  std::size_t range_ = 0;
  Bytes done_;  // of the range
};

// Follows the bytes of one file after the other, and compares blocks when they are complete.
class BlockCheck {
 public:
  explicit BlockCheck(const CheckedReading& reading) : reading_(reading) {}

  void add(const Piece& piece, std::span<const std::byte> bytes) {
    if (piece.file != file_ || piece.begin != reached_) whole_ = false;
    file_ = piece.file;
    reached_ = piece.end;
    const format::ManifestFile& file = reading_.sums[piece.file];
    const Bytes block = file.checksums.block();
    for (Bytes at = piece.begin; at < piece.end;) {
      const Bytes begin = at - at % block;
      const Bytes end = block > file.bytes - begin ? file.bytes : begin + block;
      const Bytes stop = std::min(end, piece.end);
      if (at == begin) {
        whole_ = true;
        sum_.restart();
      }
      if (whole_) sum_.add(bytes.subspan((at - piece.begin).size(), (stop - at).size()));
      if (whole_ && stop == end) compare(piece.file, begin, end);
      at = stop;
    }
  }

 private:
  void compare(std::size_t file, Bytes begin, Bytes end) {
    whole_ = false;
    const format::BlockChecksums& sums = reading_.sums[file].checksums;
    const auto number = static_cast<std::size_t>(begin / sums.block());
    if (sums.sums()[number] == sum_.value() || !reading_.wrong) return;
    reading_.wrong({file, begin, end, "is not what was written"});
  }

  const CheckedReading& reading_;
  format::RunningChecksum sum_;
  bool whole_ = false;    // whether all of the block came up to here
  std::size_t file_ = 0;  // of the last piece
  Bytes reached_{-1};     // its end
};

class Reader {
 public:
  Reader(const CheckedReading& reading, io::IoEngine& io, BufferRing& ring)
      : reading_(reading),
        io_(io),
        ring_(ring),
        pieces_(reading.ranges, ring.buffer_bytes() - kAligned),
        check_(reading),
        under_way_(ring.size()) {
    STRATA_ASSERT(ring.buffer_bytes() >= kAligned * 2);
  }

  void run() {
    std::optional<Piece> next = pieces_.next();
    for (std::size_t taken = 0, begun = 0;; ++taken) {
      for (; next && begun - taken < ring_.size(); ++begun, next = pieces_.next())
        begin(begun, *next);
      if (taken == begun) return;
      take(taken);
    }
  }

 private:
  std::span<std::byte> place_of(std::size_t turn, const Piece& piece) {
    return ring_.buffer(turn).subspan((piece.begin % kAligned).size(),
                                      (piece.end - piece.begin).size());
  }

  void begin(std::size_t turn, const Piece& piece) {
    under_way_[turn % under_way_.size()] = piece;
    const auto place = place_of(turn, piece);
    ring_.started(turn, io_.read(*reading_.files[piece.file], piece.begin, place));
  }

  void take(std::size_t turn) {
    const Piece& piece = under_way_[turn % under_way_.size()];
    try {
      ring_.wait(turn);
    } catch (const IoError& error) {
      if (!reading_.wrong) throw;
      reading_.wrong({piece.file, piece.begin, piece.end, error.what()});
      return;
    }
    const auto bytes = place_of(turn, piece);
    if (reading_.take) reading_.take(piece.file, piece.begin, bytes);
    if (reading_.verify) check_.add(piece, bytes);
  }

  const CheckedReading& reading_;
  io::IoEngine& io_;
  BufferRing& ring_;
  Pieces pieces_;
  BlockCheck check_;
  std::vector<Piece> under_way_;  // by turn
};

}  // namespace

void read_checked(const CheckedReading& reading, io::IoEngine& io, BufferRing& ring) {
  Reader(reading, io, ring).run();
}

std::vector<io::FileRange> whole_blocks(std::span<const io::FileRange> ranges,
                                        std::span<const format::ManifestFile> files) {
  std::vector<io::FileRange> result;
  for (const io::FileRange& range : ranges) {
    const format::ManifestFile& file = files[range.file];
    const Bytes block = file.checksums.block();
    const Bytes begin = range.offset - range.offset % block;
    const Bytes last = range.offset + range.bytes;
    const Bytes over = last % block;
    const Bytes end = over.value == 0                    ? last
                      : block - over > file.bytes - last ? file.bytes
                                                         : last + block - over;
    if (!result.empty() && result.back().file == range.file &&
        result.back().offset + result.back().bytes >= begin) {
      result.back().bytes = std::max(result.back().bytes, end - result.back().offset);
    } else {
      result.push_back({range.file, begin, end - begin});
    }
  }
  return result;
}

}  // namespace strata::cli
