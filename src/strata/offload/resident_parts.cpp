#include "strata/offload/resident_parts.h"

#include <iterator>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

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
