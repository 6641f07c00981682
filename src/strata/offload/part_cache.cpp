#include "strata/offload/part_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

using Clock = std::chrono::steady_clock;
using enum ResidentParts::State;

// Adds the time of its life.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  const Clock::time_point begin_;
};

std::vector<Bytes> sizes_of(std::span<const Part> parts) {
  std::vector<Bytes> sizes;
  for (const Part& part : parts) sizes.push_back(align_up(part.bytes(), kPartAlignment));
  return sizes;
}

}  // namespace

// Keeps parts that are in memory from eviction for the others of the same call.
class PartCache::Reservation {
 public:
  Reservation(PartCache& cache, std::span<const Part> parts) : cache_(cache), parts_(parts) {
    set(true);
  }
  ~Reservation() { set(false); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  void set(bool reserved) const {
    for (const Part& part : parts_) {
      if (const auto place = cache_.resident_.find(part))
        cache_.resident_.reserve(*place, reserved);
    }
  }

 private:
  PartCache& cache_;
  const std::span<const Part> parts_;
};

PartCache::PartCache(device::Device& device, std::shared_ptr<StagingArena> arena,
                     std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file)
    : device_(device),
      arena_(std::move(arena)),
      blocks_(std::move(blocks)),
      resident_(blocks_, std::move(file)) {
  arena_->join(*this);
}

PartCache::~PartCache() {
  arena_->leave(*this);
}

std::span<std::byte> PartCache::bytes_of(Place place) {
  return place->extent.bytes().first(place->part.bytes().size());
}

void PartCache::flush() {
  resident_.flush();
  if (blocks_->first_failure().empty()) return;
  resident_.take_write_failure();  // the error below reports it
  throw IoError(blocks_->first_failure());
}

bool PartCache::free_memory(StagingArena::Effort effort) {
  using enum StagingArena::Effort;
  if (effort == kReadAgain) return evict_farthest();
  if (effort == kNone) {
    advance();
    return evict_unpredicted();
  }
  for (const auto state : {kWriting, kDraining}) {
    if (resident_.in(state).empty()) continue;
    resident_.finish(resident_.in(state).begin());
    return true;
  }
  return false;
}

bool PartCache::evict_unpredicted() {
  const ResidentParts::List& evictable = resident_.in(kEvictable);
  if (evictable.empty()) return false;
  const bool stale = round_ == 0 || resident_.leases() - evictable.front().last_lease > 2 * round_;
  resident_.evict(stale ? evictable.begin() : std::prev(evictable.end()));
  return true;
}

bool PartCache::evict_farthest() {
  std::optional<Place> farthest;
  for (const auto state : {kCached, kReading}) {
    const ResidentParts::List& list = resident_.in(state);
    for (Place place = list.begin(); place != list.end(); ++place) {
      if (!place->reserved && (!farthest || place->prediction > (*farthest)->prediction))
        farthest = place;
    }
  }
  if (!farthest) return false;
  resident_.evict(*farthest);
  return true;
}

bool PartCache::predict(const Part& part) {
  if (!blocks_->good(part.block)) return false;
  if (const auto there = resident_.find(part)) {
    const Place place = *there;
    if (place->predicted || place->reserved || place->state == kLeased) return false;
    resident_.predict(place);
    return true;
  }
  if (!resident_.overlapping(part).empty()) return false;
  const Bytes pages = align_up(part.bytes(), kPartAlignment);
  const Bytes ahead = resident_.prefetched_bytes();
  if (ahead.value > 0 && ahead + pages > arena_->ahead_share()) return false;
  auto extent = arena_->take_spare(pages, *this);
  if (!extent) return false;
  resident_.prefetch(part, std::move(*extent));
  return true;
}

void PartCache::forget(const Part& part) {
  if (const auto there = resident_.find(part)) resident_.forget(*there);
}

std::vector<PartCache::Place> PartCache::lease(std::span<const Part> parts) {
  resident_.collect_writes();
  require_lendable(parts);
  const Stopwatch stopwatch(resident_.counts().seconds_waited);
  for (const Part& part : parts) {
    for (const Place place : resident_.overlapping(part)) {
      if (place->part != part) resident_.evict(place);
    }
  }
  const Reservation reservation(*this, parts);
  advance();
  const auto ready =
      std::ranges::count_if(parts, [this](const Part& part) { return is_ready(part); });
  read_missing(parts, reservation);
  std::vector<Place> places;
  for (const Part& part : parts) places.push_back(wait_for(part));
  for (const Place place : places) resident_.lease(place);
  resident_.counts().parts += static_cast<std::int64_t>(parts.size());
  resident_.counts().parts_ready += ready;
  return places;
}

void PartCache::require_lendable(std::span<const Part> parts) {
  if (const std::string failure = resident_.take_write_failure(); !failure.empty())
    throw IoError(failure);
  for (const Part& part : parts) {
    blocks_->require_good(part.block);
    for (const Place place : resident_.overlapping(part)) {
      if (place->state == kLeased) throw_leased(place->part, blocks_->name_of(part.block));
    }
  }
}

bool PartCache::is_ready(const Part& part) const {
  const auto place = resident_.find(part);
  if (!place) return !blocks_->written(part);
  return (*place)->state == kReserved ||
         ((*place)->state == kReading && (*place)->transfer->done());
}

// Takes room for the missing parts and starts reading them.
void PartCache::read_missing(std::span<const Part> parts, const Reservation& reservation) {
  std::vector<Part> missing;
  std::ranges::copy_if(parts, std::back_inserter(missing),
                       [this](const Part& part) { return !resident_.find(part); });
  if (missing.empty()) return;
  auto extents = arena_->take_together(sizes_of(missing), this);
  if (!extents && missing.size() < parts.size()) {
    // The parts in memory fragment the free room. Without them, room for all parts is found
    // together.
    reservation.set(false);
    for (const Part& part : parts) {
      if (const auto place = resident_.find(part)) resident_.evict(*place);
    }
    missing.assign(parts.begin(), parts.end());
    extents = arena_->take_together(sizes_of(missing), this);
  }
  if (!extents) throw_no_room(parts);
  for (std::size_t i = 0; i < missing.size(); ++i)
    resident_.read_reserved(missing[i], std::move((*extents)[i]));
}

PartCache::Place PartCache::wait_for(const Part& part) {
  while (true) {
    blocks_->require_good(part.block);
    const auto place = resident_.find(part);
    STRATA_ASSERT(place);
    if ((*place)->state == kReserved) return *place;
    resident_.finish(*place);
  }
}

void PartCache::throw_no_room(std::span<const Part> parts) {
  Bytes wanted;
  for (const Bytes size : sizes_of(parts)) wanted += size;
  Bytes lent;
  for (const auto& resident : resident_.in(kLeased)) lent += Bytes(resident.extent.bytes().size());
  throw UsageError(fmt::format(
      "the memory that states on a drive are staged through has no room for what is fetched: {} "
      "wanted beside {} that are leased, of {}; fetch what is needed at once in one call, in parts "
      "of lease_budget() in all, or raise the budget",
      to_string(wanted), to_string(lent), to_string(arena_->budget())));
}

void PartCache::give_back(Place place, Access access,
                          std::unique_ptr<device::Event> used) noexcept {
  try {
    if (used == nullptr && device_.runs_ahead()) used = device_.compute_stream().record();
    resident_.give_back(place, access, std::move(used));
  } catch (const std::exception& error) {
    resident_.lose_written(place, error.what());
  }
}

}  // namespace strata::offload
