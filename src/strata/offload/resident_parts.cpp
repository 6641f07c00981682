#include "strata/offload/resident_parts.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/manifest.h"

namespace strata::offload {
namespace {

constexpr std::size_t kPage = kPartAlignment.size();

std::size_t page_count(Bytes bytes) {
  return (bytes.size() + kPage - 1) / kPage;
}

// Null: there is nothing to wait for. If done() throws, the wait for the event throws the same
// error.
bool is_done(device::Event* event) {
  try {
    return event == nullptr || event->done();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

DriveBlocks::DriveBlocks(std::shared_ptr<memory::Ledger> ledger, bool verify)
    : ledger_(std::move(ledger)), verify_(verify) {}

Bytes DriveBlocks::end_with(Bytes bytes) const {
  return end_ + align_up(bytes, kPartAlignment);
}

BlockId DriveBlocks::add(BlockSpec spec) {
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

void DriveBlocks::remove_last(std::size_t count) noexcept {
  if (count == 0) return;
  const auto first = blocks_.end() - static_cast<std::ptrdiff_t>(count);
  end_ = first->offset;
  blocks_.erase(first, blocks_.end());
}

const DriveBlocks::Block& DriveBlocks::at(BlockId block) const {
  if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size()) {
    throw UsageError(fmt::format(
        "no such block in the nvme store: use the ids that add() returned; block {}, {} blocks",
        block, blocks_.size()));
  }
  return blocks_[static_cast<std::size_t>(block)];
}

bool DriveBlocks::written(const Part& part) const {
  const Block& block = at(part.block);
  if (block.written_count == block.written.size()) return part.bytes().value > 0;
  if (block.written_count == 0) return false;
  const auto first = block.written.begin();
  const auto begin = static_cast<std::ptrdiff_t>(part.begin.size() / kPage);
  const auto end = static_cast<std::ptrdiff_t>(page_count(part.end));
  return std::find(first + begin, first + end, true) != first + end;
}

void DriveBlocks::record_written(const Part& part, std::span<const std::byte> pages) {
  at(part.block);
  Block& block = blocks_[static_cast<std::size_t>(part.block)];
  const std::size_t begin = part.begin.size() / kPage;
  for (std::size_t i = 0; i < pages.size() / kPage; ++i) {
    if (!block.written[begin + i]) ++block.written_count;
    block.written[begin + i] = true;
    if (verify_) block.checksums[begin + i] = format::checksum_of(pages.subspan(i * kPage, kPage));
  }
}

void DriveBlocks::accept_read(const Part& part, std::span<std::byte> pages,
                              const std::string& path) const {
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
          fmt::format("what was read is not what was written (its checksum differs); the drive or "
                      "another process has changed it: path={} offset={} wanted={}",
                      path, (offset_of(part) + Bytes(i * kPage)).value, kPage));
    }
  }
}

std::string DriveBlocks::fail(const Part& part, const std::string& what, const std::string& why) {
  at(part.block);
  Block& block = blocks_[static_cast<std::size_t>(part.block)];
  std::string failure =
      fmt::format("states on a drive could not be {}: block '{}', bytes [{}, {}): {}", what,
                  block.name, part.begin.value, part.end.value, why);
  if (block.failure.empty()) block.failure = failure;
  if (first_failure_.empty()) first_failure_ = failure;
  return failure;
}

void DriveBlocks::require_good(BlockId block) const {
  if (const Block& found = at(block); !found.failure.empty()) throw IoError(found.failure);
}

ResidentParts::ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file)
    : blocks_(std::move(blocks)), file_(std::move(file)) {}

ResidentParts::~ResidentParts() {
  for (const Resident& resident : in(kDraining)) {
    try {
      if (resident.event) resident.event->wait();
    } catch (const std::exception&) {
      // The device has failed, and does not work on the memory any more.
    }
  }
}

std::optional<ResidentParts::Place> ResidentParts::find(const Part& part) const {
  const auto found = places_.find(part);
  if (found == places_.end()) return std::nullopt;
  return found->second;
}

std::vector<ResidentParts::Place> ResidentParts::overlapping(const Part& part) const {
  std::vector<Place> found;
  auto it = places_.lower_bound(part);
  // They lie apart, so that only one that begins before can reach into it.
  if (it != places_.begin() && std::prev(it)->first.overlaps(part)) --it;
  for (; it != places_.end() && (it->first.overlaps(part) || it->first == part); ++it)
    found.push_back(it->second);
  return found;
}

ResidentParts::Place ResidentParts::insert(const Part& part, memory::Extent extent) {
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

void ResidentParts::move(Place place, State state) {
  List& from = lists_[place->state];
  at(place).state = state;
  lists_[state].splice(lists_[state].end(), from, place);
}

void ResidentParts::drop(Place place) {
  set_prefetched(place, false);
  places_.erase(place->part);
  lists_[place->state].erase(place);
}

void ResidentParts::set_prefetched(Place place, bool prefetched) {
  if (std::exchange(at(place).prefetched, prefetched) == prefetched) return;
  const Bytes bytes(place->extent.bytes().size());
  prefetched_bytes_ = prefetched ? prefetched_bytes_ + bytes : prefetched_bytes_ - bytes;
}

void ResidentParts::read_reserved(const Part& part, memory::Extent extent) {
  const Place place = insert(part, std::move(extent));
  at(place).reserved = true;
  fill(place);
}

void ResidentParts::prefetch(const Part& part, memory::Extent extent) {
  const Place place = insert(part, std::move(extent));
  set_prefetched(place, true);
  predict(place);
  fill(place);
}

void ResidentParts::fill(Place place) {
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
void ResidentParts::end_work(Place place) {
  if (place->reserved) {
    move(place, kReserved);
  } else if (place->changed) {
    begin_write(place);
  } else {
    move(place, place->predicted ? kCached : kEvictable);
  }
}

void ResidentParts::reserve(Place place, bool reserved) {
  if (std::exchange(at(place).reserved, reserved) == reserved) return;
  if (place->state == kCached || place->state == kEvictable || place->state == kReserved)
    end_work(place);
}

void ResidentParts::lease(Place place) {
  STRATA_ASSERT(place->state == kReserved);
  at(place).reserved = at(place).predicted = false;
  at(place).last_lease = ++leases_;
  set_prefetched(place, false);
  move(place, kLeased);
}

void ResidentParts::give_back(Place place, Access access, std::unique_ptr<device::Event> event) {
  if (access == Access::kReadWrite) at(place).changed = true;
  at(place).event = std::move(event);
  move(place, kDraining);
}

void ResidentParts::predict(Place place) {
  at(place).predicted = true;
  at(place).prediction = ++predictions_;
  if (place->state == kEvictable) move(place, kCached);
}

void ResidentParts::forget(Place place) {
  at(place).predicted = false;
  set_prefetched(place, false);
  if (place->state == kCached) move(place, kEvictable);
}

void ResidentParts::begin_write(Place place) {
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

void ResidentParts::finish(Place place) {
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

void ResidentParts::count_transfer(Link link, Place place, const io::Transfer& transfer) {
  if (watch_ == nullptr) return;
  if (const auto times = transfer.times())
    watch_->record_transfer(link, Bytes(place->extent.bytes().size()), *times);
}

void ResidentParts::evict(Place place) {
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

void ResidentParts::advance() {
  while (!in(kDraining).empty() && is_done(in(kDraining).front().event.get()))
    finish(in(kDraining).begin());
  collect_writes();
}

void ResidentParts::collect_writes() {
  while (!in(kWriting).empty() && in(kWriting).front().transfer->done())
    finish(in(kWriting).begin());
}

void ResidentParts::flush() {
  while (!in(kDraining).empty()) finish(in(kDraining).begin());
  while (!in(kWriting).empty()) finish(in(kWriting).begin());
}

// The next lease of the block throws this error.
void ResidentParts::lose_read(Place place, const std::string& why) {
  blocks_->fail(place->part, "read", why);
  drop(place);
}

// The caller may never lease the written part again, so the next lease() or flush() throws this
// error.
void ResidentParts::lose_written(Place place, const std::string& why) {
  const std::string failure = blocks_->fail(place->part, "written", why);
  if (write_failure_.empty()) write_failure_ = failure;
  drop(place);
}

}  // namespace strata::offload
