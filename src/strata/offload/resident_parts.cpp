#include "strata/offload/resident_parts.h"

#include <cstring>
#include <iterator>
#include <utility>

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
  for (Resident& resident : in(kDraining)) {
    try {
      if (resident.event) resident.event->wait();
    } catch (const std::exception&) {
      // The device has failed, and does not work on the memory any more.
    }
  }
}

void ResidentParts::move(Place place, State state) {
  List& from = in(place->state);
  place->state = state;
  in(state).splice(in(state).end(), from, place);
}

ResidentParts::Place ResidentParts::insert(const Part& part, memory::Extent extent) {
  List& claimed = in(kReserved);
  claimed.emplace_back();
  const Place place = std::prev(claimed.end());
  place->part = part;
  place->extent = std::move(extent);
  try {
    places_.emplace(part, place);
  } catch (...) {
    claimed.erase(place);
    throw;
  }
  return place;
}

void ResidentParts::set_ahead(Place place, bool ahead) {
  if (place->ahead == ahead) return;
  place->ahead = ahead;
  const Bytes bytes(place->extent.bytes().size());
  ahead_bytes_ = ahead ? ahead_bytes_ + bytes : ahead_bytes_ - bytes;
}

void ResidentParts::drop(Place place) {
  set_ahead(place, false);
  places_.erase(place->part);
  in(place->state).erase(place);
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

void ResidentParts::rest(Place place) {
  if (place->claimed) {
    move(place, kReserved);
  } else if (place->changed) {
    begin_write(place);
  } else {
    move(place, place->expected ? kCached : kEvictable);
  }
}

void ResidentParts::fill(Place place) {
  const std::span<std::byte> pages = place->extent.bytes();
  if (!blocks_->written(place->part)) {
    file_->clear(pages);
    rest(place);
    return;
  }
  try {
    place->transfer = file_->read(blocks_->offset_of(place->part), pages);
  } catch (const std::exception& error) {
    lose_read(place, error.what());
    return;
  }
  ++counts_.reads;
  counts_.read += Bytes(pages.size());
  move(place, kReading);
}

void ResidentParts::finish_read(Place place) {
  try {
    const std::unique_ptr<io::Transfer> transfer = std::move(place->transfer);
    transfer->wait();
    tell(Link::kRead, place, *transfer);
    blocks_->accept_read(place->part, place->extent.bytes(), file_->path());
  } catch (const std::exception& error) {
    lose_read(place, error.what());
    return;
  }
  rest(place);
}

void ResidentParts::begin_write(Place place) {
  const std::span<std::byte> pages = place->extent.bytes();
  try {
    blocks_->note_written(place->part, pages);
    place->transfer = file_->write(blocks_->offset_of(place->part), pages);
  } catch (const std::exception& error) {
    lose_written(place, error.what());
    return;
  }
  ++counts_.writes;
  counts_.written += Bytes(pages.size());
  place->changed = false;
  move(place, kWriting);
}

void ResidentParts::finish_write(Place place) {
  try {
    const std::unique_ptr<io::Transfer> transfer = std::move(place->transfer);
    transfer->wait();
    tell(Link::kWrite, place, *transfer);
  } catch (const std::exception& error) {
    lose_written(place, error.what());
    return;
  }
  rest(place);
}

void ResidentParts::tell(Link link, Place place, const io::Transfer& transfer) {
  if (watch_ == nullptr) return;
  if (const auto times = transfer.times())
    watch_->record_transfer(link, Bytes(place->extent.bytes().size()), *times);
}

void ResidentParts::finish_work(Place place) {
  try {
    const std::unique_ptr<device::Event> event = std::move(place->event);
    if (event) event->wait();
  } catch (const std::exception& error) {
    lose_written(place, error.what());
    return;
  }
  rest(place);
}

void ResidentParts::settle(Place place, std::unique_ptr<device::Event> event) {
  place->event = std::move(event);
  move(place, kDraining);
}

void ResidentParts::finish(Place place) {
  if (place->state == kReading) {
    finish_read(place);
  } else if (place->state == kDraining) {
    finish_work(place);
  } else {
    STRATA_ASSERT(place->state == kWriting);
    finish_write(place);
  }
}

void ResidentParts::expel(Place place) {
  const Part part = place->part;
  STRATA_ASSERT(place->state != kLeased && !place->claimed);
  place->expected = false;
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
    finish_work(in(kDraining).begin());
  collect();
}

void ResidentParts::collect() {
  while (!in(kWriting).empty() && in(kWriting).front().transfer->done())
    finish_write(in(kWriting).begin());
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
