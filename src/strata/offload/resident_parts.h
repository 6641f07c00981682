// The parts of a drive's blocks that lie in memory now, each in a state. Only this class changes
// states. A part is resident at most once; resident parts never overlap.
//
//   drive -> reading -> cached or evictable -> reserved -> leased -> draining -> writing
//                                                                -> cached or evictable
//
// Each state has one meaning (docs/GLOSSARY.md). A draining part waits for the device's work on it,
// and for the next call: if that call leases the part again, it is not written in between. A part
// that was only read is not written. A part whose read or write failed is dropped.
//
// Threads: one. Ownership: keeps blocks and file; a Place is valid until its part is dropped.
// Errors: the error of a part stays with its block; these functions throw none of them.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/memory/arena.h"
#include "strata/memory/ledger.h"
#include "strata/offload/block_file.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// The bookkeeping of a store on a drive: where each block lies, which of its pages were ever
// written, the checksums of those pages, and whether the block can still be trusted. A page that
// was never written holds zeroes, whatever the drive returns. Threads: one. Memory: one bit for
// each page of 4 KiB; with checksums 8 bytes more, charged. Errors: UsageError for an unknown
// block; IoError for a block that has failed.
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

class ResidentParts {
 public:
  enum State : std::uint8_t {
    kReading,
    kCached,
    kEvictable,
    kReserved,
    kLeased,
    kDraining,
    kWriting
  };
  static constexpr std::size_t kStates = 7;
  struct Resident {
    Part part;
    memory::Extent extent;  // whole pages
    State state = kReserved;
    bool reserved = false;        // a call is about to lease it
    bool changed = false;         // since it was read or written
    bool predicted = false;       // it has a predicted use
    bool prefetched = false;      // and was not leased yet
    std::int64_t prediction = 0;  // the number of its predicted use
    std::int64_t last_lease = 0;  // leases() when it was leased last, or came
    std::unique_ptr<io::Transfer> transfer;
    std::unique_ptr<device::Event> event;
  };
  using List = std::list<Resident>;
  using Place = List::const_iterator;

  ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~ResidentParts();  // waits for reads, writes and device work
  ResidentParts(const ResidentParts&) = delete;
  ResidentParts& operator=(const ResidentParts&) = delete;

  const List& in(State state) const { return lists_[state]; }  // oldest in the state first
  std::optional<Place> find(const Part& part) const;
  std::vector<Place> overlapping(const Part& part) const;
  Bytes prefetched_bytes() const { return prefetched_bytes_; }  // of parts that are `prefetched`
  std::int64_t leases() const { return leases_; }               // of parts, so far

  // Brings a new part into memory: reads it, or fills it with zeroes if it was never written. It is
  // reserved, or else prefetched with a predicted use.
  void read_reserved(const Part& part, memory::Extent extent);
  void prefetch(const Part& part, memory::Extent extent);
  // A reserved part keeps its memory. It is in kReserved when the work on it has ended.
  void reserve(Place place, bool reserved);
  void lease(Place place);  // from kReserved
  // Takes back a leased part. `event` completes when the device has finished with it; null: it has.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> event);
  void predict(Place place);  // a use after all predicted so far
  void forget(Place place);   // its use is not predicted any more
  // Waits for the work on the part that its state means: reading, draining or writing.
  void finish(Place place);
  // Waits for all work on the part, and drops it. It is neither leased nor reserved.
  void evict(Place place);
  // The part's content is lost. `why`: the error, for take_write_failure().
  void lose_written(Place place, const std::string& why);

  // Begins and finishes all work that needs no wait.
  void advance();
  // The part of advance() that finishes writes.
  void collect_writes();
  void flush();  // waits until all returned parts are written

  // The error of a write that no call has thrown yet; empty: none.
  std::string take_write_failure() { return std::exchange(write_failure_, {}); }
  StoreCounts& counts() { return counts_; }
  // Notified of every complete transfer; may be null.
  void watch(LinkWatch* watch) { watch_ = watch; }

 private:
  static Resident& at(Place place) { return const_cast<Resident&>(*place); }
  Place insert(const Part& part, memory::Extent extent);
  void move(Place place, State state);
  void drop(Place place);
  void set_prefetched(Place place, bool prefetched);
  void fill(Place place);
  void end_work(Place place);
  void begin_write(Place place);
  void count_transfer(Link link, Place place, const io::Transfer& transfer);
  void lose_read(Place place, const std::string& why);

  const std::shared_ptr<DriveBlocks> blocks_;
  const std::shared_ptr<BlockFile> file_;
  std::array<List, kStates> lists_;  // by state
  std::map<Part, Place> places_;
  Bytes prefetched_bytes_;
  std::int64_t leases_ = 0;
  std::int64_t predictions_ = 0;
  std::string write_failure_;
  StoreCounts counts_;
  LinkWatch* watch_ = nullptr;
};

}  // namespace strata::offload
