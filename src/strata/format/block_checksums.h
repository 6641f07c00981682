// Checksums (XXH3, 64 bits) of a file in blocks of one size, the last one shorter. A reader of a
// part of a file reads whole blocks and can name a block that has changed. Blocks grow
// with the file, so that a manifest stays small. Threads: one; a finished one is immutable. Errors:
// UsageError for bytes that do not follow the last ones; what check() throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/units.h"

struct XXH3_state_s;  // of xxhash.h

namespace strata::format {

std::uint64_t checksum_of(std::span<const std::byte> bytes);
// 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

class BlockChecksums {
 public:
  BlockChecksums() = default;
  BlockChecksums(Bytes block, std::vector<std::uint64_t> sums)
      : block_(block), sums_(std::move(sums)) {}

  // The block for a file of `file_bytes`: 1 MiB, doubled until the file has at most 65,536 blocks.
  static Bytes block_for(Bytes file_bytes);

  Bytes block() const { return block_; }
  const std::vector<std::uint64_t>& sums() const { return sums_; }
  // Whether these are the sums of a file of `file_bytes`.
  bool fits(Bytes file_bytes) const;
  // Sets the sums of the blocks that begin at `offset`, a multiple of a block; `bytes` are whole
  // blocks, or reach the end of the file. Blocks may come in any order.
  void set(Bytes offset, std::span<const std::byte> bytes);
  // The offset in the file of the first of these blocks that is not what was written; negative:
  // all are. Arguments as of set().
  Bytes first_wrong(Bytes offset, std::span<const std::byte> bytes) const;

 private:
  Bytes block_ = 1_MiB;
  std::vector<std::uint64_t> sums_;
};

// A file's sums as hexadecimal digits, 16 a block, and back; empty where the text is no such thing.
std::string sums_text(std::span<const std::uint64_t> sums);
bool parse_sums(std::string_view text, std::vector<std::uint64_t>& sums);

// The checksum of bytes that come in parts, as checksum_of() says it of all of them at once: so
// that a block larger than any buffer can be checked. Threads: one. Errors: none.

class RunningChecksum {
 public:
  RunningChecksum();

  void restart();
  void add(std::span<const std::byte> bytes);
  // The checksum of the bytes added since the last restart().
  std::uint64_t value() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace strata::format
