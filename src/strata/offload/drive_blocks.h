// The bookkeeping of a store on a drive: where each block lies, which of its pages were ever
// written, the checksums of those pages, and whether the block can still be trusted. A page that
// was never written holds zeroes, whatever the drive returns. Threads: one. Memory: one bit for
// each page of 4 KiB; with checksums 8 bytes more, charged. Errors: UsageError for an unknown
// block; IoError for a block that has failed.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/memory/ledger.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class DriveBlocks {
 public:
  // `verify`: keeps a checksum of each page.
  DriveBlocks(std::shared_ptr<memory::Ledger> ledger, bool verify);

  // The end that a block of `bytes` would have behind all others.
  Bytes end_with(Bytes bytes) const;
  // Adds a block behind all others.
  BlockId add(BlockSpec spec);
  // Removes the last `count` blocks; the next block begins where the first of them began.
  void remove_last(std::size_t count) noexcept;
  const std::string& name_of(BlockId block) const { return at(block).name; }
  Bytes size_of(BlockId block) const { return at(block).size; }
  // The offset of the part's first byte on the drive.
  Bytes offset_of(const Part& part) const { return at(part.block).offset + part.begin; }
  Bytes end() const { return end_; }

  // Whether any page of the part was written.
  bool written(const Part& part) const;
  // `pages`: the part's whole pages, which are about to be written.
  void record_written(const Part& part, std::span<const std::byte> pages);
  // Turns the bytes that were read into the part's content: pages that were never written become
  // zeroes. IoError if a page differs from what was written; `path` is for the message.
  void accept_read(const Part& part, std::span<std::byte> pages, const std::string& path) const;

  // Records that a part failed, so that its block is not used from now on. Returns the whole
  // message.
  std::string fail(const Part& part, const std::string& what, const std::string& why);
  // IoError with the block's first failure, if it has one.
  void require_good(BlockId block) const;
  bool good(BlockId block) const { return at(block).failure.empty(); }
  // The message of the first block that failed; empty if none did.
  const std::string& first_failure() const { return first_failure_; }

 private:
  struct Block {
    std::string name;
    Bytes size;
    Bytes offset;
    memory::Charge charge;
    memory::Charge checksum_charge;
    std::vector<bool> written;             // by page
    std::size_t written_count = 0;         // pages
    std::vector<std::uint64_t> checksums;  // by page; empty: none are kept
    std::string failure;                   // empty: none
  };
  const Block& at(BlockId block) const;

  const std::shared_ptr<memory::Ledger> ledger_;
  const bool verify_;
  std::vector<Block> blocks_;
  Bytes end_;
  std::string first_failure_;
};

}  // namespace strata::offload
