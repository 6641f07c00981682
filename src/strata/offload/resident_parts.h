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

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/device/device.h"
#include "strata/format/manifest.h"
#include "strata/memory/ledger.h"
#include "strata/offload/block_file.h"
#include "strata/offload/staging_arena.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

inline constexpr std::size_t kPage = kPartAlignment.size();

inline std::size_t page_count(Bytes bytes) {
  return (bytes.size() + kPage - 1) / kPage;
}

// Null: there is nothing to wait for. If done() throws, the wait for the event throws the same
// error.
inline bool is_done(device::Event* event) {
  try {
    return event == nullptr || event->done();
  } catch (const std::exception&) {
    return true;
  }
}

// The bookkeeping of a store on a drive: where each block lies, which of its pages were ever
// written, the checksums of those pages, and whether the block can still be trusted. A page that
// was never written holds zeroes, whatever the drive returns. Threads: one. Memory: one bit for
// each page of 4 KiB; with checksums 8 bytes more, charged. Errors: UsageError for an unknown
// block; IoError for a block that has failed.
class DriveBlocks {
 public:
  // `verify`: keeps a checksum of each page.
  DriveBlocks(std::shared_ptr<memory::Ledger> ledger, bool verify)
      : ledger_(std::move(ledger)), verify_(verify) {}

  // The end that a block of `bytes` would have behind all others.
  Bytes end_with(Bytes bytes) const { return end_ + align_up(bytes, kPartAlignment); }
  // Adds a block behind all others.
  BlockId add(BlockSpec spec) {
    Block block;
    block.name = std::move(spec.name);
    block.size = spec.bytes;
    block.offset = end_;
    block.charge = memory::Charge(ledger_, memory::Tier::kNvme, spec.kind, spec.bytes);
    const std::size_t pages = page_count(spec.bytes);
    block.written.resize(pages);
    if (verify_) {
      const Bytes bytes(pages * sizeof(std::uint64_t));
      block.checksum_charge =
          memory::Charge(ledger_, memory::Tier::kHost, memory::Kind::kWorkspace, bytes);
      block.checksums.resize(pages);
    }
    const Bytes end = end_with(spec.bytes);
    blocks_.push_back(std::move(block));
    end_ = end;
    return static_cast<BlockId>(blocks_.size() - 1);
  }
  // Removes the last `count` blocks; the next block begins where the first of them began.
  void remove_last(std::size_t count) noexcept {
    if (count == 0) return;
    const auto first = blocks_.end() - static_cast<std::ptrdiff_t>(count);
    end_ = first->offset;
    blocks_.erase(first, blocks_.end());
  }
  const std::string& name_of(BlockId block) const { return at(block).name; }
  Bytes size_of(BlockId block) const { return at(block).size; }
  // The offset of the part's first byte on the drive.
  Bytes offset_of(const Part& part) const { return at(part.block).offset + part.begin; }
  Bytes end() const { return end_; }

  // Whether any page of the part was written.
  bool written(const Part& part) const {
    const Block& block = at(part.block);
    if (block.written_count == block.written.size()) return part.bytes().value > 0;
    if (block.written_count == 0) return false;
    const auto first = block.written.begin();
    const auto begin = static_cast<std::ptrdiff_t>(part.begin.size() / kPage);
    const auto end = static_cast<std::ptrdiff_t>(page_count(part.end));
    return std::find(first + begin, first + end, true) != first + end;
  }
  // `pages`: the part's whole pages, which are about to be written.
  void record_written(const Part& part, std::span<const std::byte> pages) {
    at(part.block);
    Block& block = blocks_[static_cast<std::size_t>(part.block)];
    if (!verify_ && block.written_count == block.written.size()) return;
    const std::size_t begin = part.begin.size() / kPage;
    for (std::size_t i = 0; i < pages.size() / kPage; ++i) {
      if (!block.written[begin + i]) ++block.written_count;
      block.written[begin + i] = true;
      if (verify_)
        block.checksums[begin + i] = format::checksum_of(pages.subspan(i * kPage, kPage));
    }
  }
  // Turns the bytes that were read into the part's content: pages that were never written become
  // zeroes. IoError if a page differs from what was written; `path` is for the message.
  void accept_read(const Part& part, std::span<std::byte> pages, const std::string& path) const {
    const Block& block = at(part.block);
    const bool whole = block.written_count == block.written.size();
    if (whole && !verify_) return;
    const std::size_t begin = part.begin.size() / kPage;
    for (std::size_t i = 0; i < pages.size() / kPage; ++i) {
      const std::span<std::byte> page = pages.subspan(i * kPage, kPage);
      if (!block.written[begin + i]) {
        std::memset(page.data(), 0, page.size());
      } else if (verify_ && format::checksum_of(page) != block.checksums[begin + i]) {
        throw IoError(
            "what was read is not what was written (its checksum differs); the drive or another "
            "process has changed it: path={} offset={} wanted={}",
            path, (offset_of(part) + Bytes(i * kPage)).value, kPage);
      }
    }
  }

  // Records that a part failed, so that its block is not used from now on. Returns the whole
  // message.
  std::string fail(const Part& part, const std::string& what, const std::string& why) {
    at(part.block);
    Block& block = blocks_[static_cast<std::size_t>(part.block)];
    std::string failure =
        fmt::format("states on a drive could not be {}: block '{}', bytes [{}, {}): {}", what,
                    block.name, part.begin.value, part.end.value, why);
    if (block.failure.empty()) block.failure = failure;
    if (first_failure_.empty()) first_failure_ = failure;
    return failure;
  }
  // IoError with the block's first failure, if it has one.
  void require_good(BlockId block) const {
    if (const Block& found = at(block); !found.failure.empty()) throw IoError(found.failure);
  }
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
  const Block& at(BlockId block) const {
    if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size())
      throw UsageError(
          "no such block in the nvme store: use the ids that add() returned; block {}, {} blocks",
          block, blocks_.size());
    return blocks_[static_cast<std::size_t>(block)];
  }

  const std::shared_ptr<memory::Ledger> ledger_;
  const bool verify_;
  std::vector<Block> blocks_;
  Bytes end_;
  std::string first_failure_;
};

class ResidentParts : NonCopyable {
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
    Extent extent;  // whole pages
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

  ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file)
      : blocks_(std::move(blocks)), file_(std::move(file)) {}
  // waits for reads, writes and device work
  ~ResidentParts() {
    for (const Resident& resident : in(kDraining)) {
      try {
        if (resident.event) resident.event->wait();
      } catch (const std::exception&) {
        // The device has failed, and does not work on the memory any more.
      }
    }
  }

  const List& in(State state) const { return lists_[state]; }  // oldest in the state first
  std::optional<Place> find(const Part& part) const {
    const auto found = places_.find(part);
    if (found == places_.end()) return std::nullopt;
    return found->second;
  }
  std::vector<Place> overlapping(const Part& part) const {
    std::vector<Place> found;
    auto it = places_.lower_bound(part);
    // They lie apart, so that only one that begins before can reach into it.
    if (it != places_.begin() && std::prev(it)->first.overlaps(part)) --it;
    for (; it != places_.end() && (it->first.overlaps(part) || it->first == part); ++it)
      found.push_back(it->second);
    return found;
  }
  Bytes prefetched_bytes() const { return prefetched_bytes_; }  // of parts that are `prefetched`
  std::int64_t leases() const { return leases_; }               // of parts, so far

  // Brings a new part into memory: reads it, or fills it with zeroes if it was never written. It is
  // reserved, or else prefetched with a predicted use.
  void read_reserved(const Part& part, Extent extent) {
    const Place place = insert(part, std::move(extent));
    at(place).reserved = true;
    fill(place);
  }
  void prefetch(const Part& part, Extent extent) {
    const Place place = insert(part, std::move(extent));
    set_prefetched(place, true);
    predict(place);
    fill(place);
  }
  // A reserved part keeps its memory. It is in kReserved when the work on it has ended.
  void reserve(Place place, bool reserved) {
    if (std::exchange(at(place).reserved, reserved) == reserved) return;
    if (place->state == kCached || place->state == kEvictable || place->state == kReserved)
      end_work(place);
  }
  // from kReserved
  void lease(Place place) {
    STRATA_ASSERT(place->state == kReserved);
    at(place).reserved = at(place).predicted = false;
    at(place).last_lease = ++leases_;
    set_prefetched(place, false);
    move(place, kLeased);
  }
  // Takes back a leased part. `event` completes when the device has finished with it; null: it has.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> event) {
    if (access == Access::kReadWrite) at(place).changed = true;
    at(place).event = std::move(event);
    move(place, kDraining);
  }
  // a use after all predicted so far
  void predict(Place place) {
    at(place).predicted = true;
    at(place).prediction = ++predictions_;
    if (place->state == kEvictable) move(place, kCached);
  }
  // its use is not predicted any more
  void forget(Place place) {
    at(place).predicted = false;
    set_prefetched(place, false);
    if (place->state == kCached) move(place, kEvictable);
  }
  // Waits for the work on the part that its state means: reading, draining or writing.
  void finish(Place place) {
    const bool reading = place->state == kReading;
    STRATA_ASSERT(reading || place->state == kDraining || place->state == kWriting);
    try {
      if (place->state == kDraining) {
        if (const auto event = std::move(at(place).event)) event->wait();
      } else {
        const auto transfer = std::move(at(place).transfer);
        transfer->wait();
        count_transfer(reading ? Link::kRead : Link::kWrite, place, *transfer);
        if (reading) blocks_->accept_read(place->part, place->extent.bytes(), file_->path());
      }
    } catch (const std::exception& error) {
      return reading ? lose_read(place, error.what()) : lose_written(place, error.what());
    }
    end_work(place);
  }
  // Waits for all work on the part, and drops it. It is neither leased nor reserved.
  void evict(Place place) {
    const Part part = place->part;
    STRATA_ASSERT(place->state != kLeased && !place->reserved);
    at(place).predicted = false;
    for (auto there = find(part); there; there = find(part)) {
      if ((*there)->state == kCached || (*there)->state == kEvictable) {
        drop(*there);
      } else {
        finish(*there);
      }
    }
  }
  // The part's content is lost. `why`: the error, for take_write_failure().
  // The caller may never lease the written part again, so the next lease() or flush() throws this
  // error.
  void lose_written(Place place, const std::string& why) {
    const std::string failure = blocks_->fail(place->part, "written", why);
    if (write_failure_.empty()) write_failure_ = failure;
    drop(place);
  }

  // Begins and finishes all work that needs no wait.
  void advance() {
    while (!in(kDraining).empty() && is_done(in(kDraining).front().event.get()))
      finish(in(kDraining).begin());
    collect_writes();
  }
  // The part of advance() that finishes writes.
  void collect_writes() {
    while (!in(kWriting).empty() && in(kWriting).front().transfer->done())
      finish(in(kWriting).begin());
  }
  // waits until all returned parts are written
  void flush() {
    while (!in(kDraining).empty()) finish(in(kDraining).begin());
    while (!in(kWriting).empty()) finish(in(kWriting).begin());
  }

  // The error of a write that no call has thrown yet; empty: none.
  std::string take_write_failure() { return std::exchange(write_failure_, {}); }
  StoreCounts& counts() { return counts_; }
  // Notified of every complete transfer; may be null.
  void watch(LinkWatch* watch) { watch_ = watch; }

 private:
  static Resident& at(Place place) { return const_cast<Resident&>(*place); }
  Place insert(const Part& part, Extent extent) {
    List& reserved = lists_[kReserved];
    Resident& added = reserved.emplace_back();
    added.part = part;
    added.extent = std::move(extent);
    added.last_lease = leases_;
    const Place place = std::prev(reserved.end());
    try {
      places_.emplace(part, place);
    } catch (...) {
      reserved.erase(place);
      throw;
    }
    return place;
  }
  void move(Place place, State state) {
    List& from = lists_[place->state];
    at(place).state = state;
    lists_[state].splice(lists_[state].end(), from, place);
  }
  void drop(Place place) {
    set_prefetched(place, false);
    places_.erase(place->part);
    lists_[place->state].erase(place);
  }
  void set_prefetched(Place place, bool prefetched) {
    if (std::exchange(at(place).prefetched, prefetched) == prefetched) return;
    const Bytes bytes(place->extent.bytes().size());
    prefetched_bytes_ = prefetched ? prefetched_bytes_ + bytes : prefetched_bytes_ - bytes;
  }
  void fill(Place place) {
    const std::span<std::byte> pages = place->extent.bytes();
    if (!blocks_->written(place->part)) {
      file_->clear(pages);
      return end_work(place);
    }
    try {
      at(place).transfer = file_->read(blocks_->offset_of(place->part), pages);
    } catch (const std::exception& error) {
      return lose_read(place, error.what());
    }
    ++counts_.reads;
    counts_.read += Bytes(pages.size());
    move(place, kReading);
  }
  // No work is under way on the part any more.
  void end_work(Place place) {
    if (place->reserved) {
      move(place, kReserved);
    } else if (place->changed) {
      begin_write(place);
    } else {
      move(place, place->predicted ? kCached : kEvictable);
    }
  }
  void begin_write(Place place) {
    const std::span<std::byte> pages = place->extent.bytes();
    try {
      blocks_->record_written(place->part, pages);
      at(place).transfer = file_->write(blocks_->offset_of(place->part), pages);
    } catch (const std::exception& error) {
      return lose_written(place, error.what());
    }
    ++counts_.writes;
    counts_.written += Bytes(pages.size());
    at(place).changed = false;
    move(place, kWriting);
  }
  void count_transfer(Link link, Place place, const io::Transfer& transfer) {
    if (watch_ == nullptr) return;
    if (const auto times = transfer.times())
      watch_->record_transfer(link, Bytes(place->extent.bytes().size()), *times);
  }
  // The next lease of the block throws this error.
  void lose_read(Place place, const std::string& why) {
    blocks_->fail(place->part, "read", why);
    drop(place);
  }

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
