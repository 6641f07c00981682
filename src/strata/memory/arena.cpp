#include "strata/memory/arena.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <mutex>

#include "strata/base/error.h"

namespace strata::memory {
namespace {

bool is_power_of_two(Bytes bytes) {
  return bytes.value > 0 && std::has_single_bit(static_cast<std::uint64_t>(bytes.value));
}

}  // namespace

OffsetAllocator::OffsetAllocator(Bytes capacity, Bytes granule)
    : granule_(granule), capacity_(capacity / granule.value * granule.value) {
  STRATA_ASSERT(capacity.value >= 0 && is_power_of_two(granule));
  if (capacity_ == Bytes()) return;
  put_free(by_offset_.insert(make_held(Bytes(), capacity_)).position);
}

std::optional<Bytes> OffsetAllocator::try_allocate(Bytes size) {
  STRATA_ASSERT(size.value >= 0);
  if (size > capacity_) return std::nullopt;  // and rounding up cannot overflow below
  size = align_up(std::max(size, Bytes(1)), granule_);
  const auto found = by_size_.lower_bound({size, Bytes()});
  if (found == by_size_.end()) return std::nullopt;

  const auto [whole, offset] = *found;
  const Bytes after = whole - size;
  // All that may throw comes first; then the range is split by moving nodes.
  ByOffset::node_type rest;
  if (after.value > 0) rest = make_held(offset + size, after);

  const auto range = by_offset_.find(offset);
  range->second.kept = by_size_.extract(found);
  range->second.size = size;
  if (after.value > 0) put_free(by_offset_.insert(std::move(rest)).position);
  in_use_ += size;
  return offset;
}

void OffsetAllocator::release(Bytes offset) {
  auto range = by_offset_.find(offset);
  STRATA_ASSERT(range != by_offset_.end() && !range->second.free());
  in_use_ -= range->second.size;
  if (const auto next = std::next(range); next != by_offset_.end() && next->second.free()) {
    range->second.size += next->second.size;
    by_size_.erase({next->second.size, next->first});
    by_offset_.erase(next);
  }
  if (range != by_offset_.begin() && std::prev(range)->second.free()) {
    const auto previous = std::prev(range);
    previous->second.kept = by_size_.extract({previous->second.size, previous->first});
    previous->second.size += range->second.size;
    by_offset_.erase(range);
    range = previous;
  }
  put_free(range);
}

OffsetAllocator::ByOffset::node_type OffsetAllocator::make_held(Bytes offset, Bytes size) {
  BySize by_size;
  const auto sized = by_size.emplace(size, offset).first;
  ByOffset by_offset;
  const auto range = by_offset.emplace(offset, Range{size, by_size.extract(sized)}).first;
  return by_offset.extract(range);
}

void OffsetAllocator::put_free(ByOffset::iterator range) {
  BySize::node_type node = std::move(range->second.kept);
  node.value() = {range->second.size, range->first};
  by_size_.insert(std::move(node));
}

struct Extent::Home {
  Home(std::span<std::byte> span, Bytes granule)
      : memory(span), offsets(Bytes(span.size()), granule) {}

  const std::span<std::byte> memory;
  std::mutex mutex;
  OffsetAllocator offsets;  // guarded by mutex
};

void Extent::GiveBack::operator()(Home*) const noexcept {
  const std::lock_guard lock(home->mutex);
  home->offsets.release(offset);
}

Arena::Arena(std::span<std::byte> memory, Bytes granule)
    : home_(std::make_shared<Extent::Home>(memory, granule)) {
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(memory.data()) % granule.size() == 0);
}

std::optional<Extent> Arena::try_allocate(Bytes bytes) {
  const std::lock_guard lock(home_->mutex);
  const auto offset = home_->offsets.try_allocate(bytes);
  if (!offset) return std::nullopt;
  Extent extent;
  extent.held_ = decltype(extent.held_)(home_.get(), Extent::GiveBack{home_, *offset});
  extent.bytes_ = home_->memory.subspan(offset->size(), bytes.size());
  return extent;
}

Bytes Arena::capacity() const {
  return home_->offsets.capacity();
}

Bytes Arena::in_use() const {
  const std::lock_guard lock(home_->mutex);
  return home_->offsets.in_use();
}

}  // namespace strata::memory
