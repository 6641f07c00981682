// What a store on a drive knows of its blocks: where each lies, which of its pages were ever
// written, what they hold by their checksums, and whether it can still be trusted. A page that was
// never written holds zeroes, whatever the drive says. Threads: one. Memory: a bit for each page of
// 4 KiB; with checksums 8 bytes more, charged. Errors: UsageError for a block that there is not;
// IoError for one that has failed.
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

  // Where a block ends that would come after all others.
  Bytes end_with(Bytes bytes) const;
  // The next one.
  BlockId add(BlockSpec spec);
  // The last `count` go; the next one comes to where the first of them was.
  void remove_last(std::size_t count) noexcept;
  const std::string& name_of(BlockId block) const { return at(block).name; }
  Bytes size_of(BlockId block) const { return at(block).size; }
  // Where the part's first byte lies on the drive.
  Bytes offset_of(const Part& part) const { return at(part.block).offset + part.begin; }
  Bytes end() const { return end_; }

  // Whether any page of it was.
  bool written(const Part& part) const;
  // `pages`: those of the part, whole, that are about to be written.
  void note_written(const Part& part, std::span<const std::byte> pages);
  // Makes the part of what was read: zeroes where nothing was written. IoError where a page is not
  // what was written; `path` is for the message.
  void accept_read(const Part& part, std::span<std::byte> pages, const std::string& path) const;

  // Notes that a part failed: nobody may trust its block from now on. Returns the whole message.
  std::string fail(const Part& part, const std::string& what, const std::string& why);
  // IoError if the block has failed, as it did first.
  void require_good(BlockId block) const;
  bool good(BlockId block) const { return at(block).failure.empty(); }
  // The message of the first block that failed; empty: none did.
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
