// Extents of any size out of one fixed span of memory: staging buffers for transfers, sized by the
// tensors that pass through. Nothing is allocated but bookkeeping, and the span is never exceeded.
// Threads: one at a time. Ownership: the span belongs to the caller and outlives the extents;
// extents may outlive the arena.
// Units: sizes are rounded up to the granule, so that every extent is aligned to it.
// Errors: none; try_allocate returns nullopt when no free piece is large enough, and the caller
// waits, streams in smaller pieces, or writes the message.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/units.h"

namespace strata::memory {

// Gives out ranges [offset, offset + size) of a fixed space that it never touches: memory of an
// arena, bytes of a file. Best fit: the smallest free range that suffices, the lowest offset among
// equals; freed ranges are joined with their free neighbours at once, so that no two free ranges
// ever touch.
// Cost: O(log n) in the number of ranges.
// Threads: one at a time.
// Units: bytes; sizes are rounded up to the granule, and so are offsets.
// Errors: none but InternalError for a range that is not held; a release never allocates.
class OffsetAllocator {
 public:
  // `granule` is a power of two; the rest of `capacity` beyond whole granules is unused.
  OffsetAllocator(Bytes capacity, Bytes granule)
      : granule_(granule), capacity_(capacity / granule.value * granule.value) {
    STRATA_ASSERT(capacity.value >= 0 && granule.value > 0 &&
                  std::has_single_bit(static_cast<std::uint64_t>(granule.value)));
    if (capacity_ == Bytes()) return;
    put_free(by_offset_.insert(make_held(Bytes(), capacity_)).position);
  }

  // Offset of a range of at least `size` bytes (0 takes one granule); nullopt when no free range
  // holds it.
  std::optional<Bytes> try_allocate(Bytes size) {
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
  void release(Bytes offset) {
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

  Bytes capacity() const { return capacity_; }
  Bytes in_use() const { return in_use_; }  // with the rounding

 private:
  using BySize = std::set<std::pair<Bytes, Bytes>>;  // (size, offset)
  // A range, free or held. Each owns one node of by_size_: in the set while the range is free,
  // kept here while it is held, so that to release is to put it back.
  struct Range {
    Bytes size;
    BySize::node_type kept;
    bool free() const { return kept.empty(); }
  };
  using ByOffset = std::map<Bytes, Range>;  // covers the capacity without gaps

  static ByOffset::node_type make_held(Bytes offset, Bytes size) {
    BySize by_size;
    const auto sized = by_size.emplace(size, offset).first;
    ByOffset by_offset;
    const auto range = by_offset.emplace(offset, Range{size, by_size.extract(sized)}).first;
    return by_offset.extract(range);
  }
  void put_free(ByOffset::iterator range) {
    BySize::node_type node = std::move(range->second.kept);
    node.value() = {range->second.size, range->first};
    by_size_.insert(std::move(node));
  }

  const Bytes granule_;
  const Bytes capacity_;
  Bytes in_use_;
  ByOffset by_offset_;
  BySize by_size_;  // the free ranges
};

// A piece of an arena; given back by the destructor. Movable.
class Extent {
 public:
  Extent() = default;
  // Exactly as many as asked for.
  std::span<std::byte> bytes() const { return held_ ? bytes_ : std::span<std::byte>(); }

 private:
  friend class Arena;
  struct Home {
    Home(std::span<std::byte> span, Bytes granule)
        : memory(span), offsets(Bytes(span.size()), granule) {}

    const std::span<std::byte> memory;
    OffsetAllocator offsets;
  };
  struct GiveBack {
    std::shared_ptr<Home> home;
    Bytes offset;
    void operator()(Home*) const noexcept { home->offsets.release(offset); }
  };

  std::unique_ptr<Home, GiveBack> held_;  // null: holds nothing
  std::span<std::byte> bytes_;
};

class Arena {
 public:
  static constexpr Bytes kDefaultGranule = 256_B;

  // `memory` begins at a multiple of `granule`, a power of two.
  explicit Arena(std::span<std::byte> memory, Bytes granule = kDefaultGranule)
      : home_(std::make_shared<Extent::Home>(memory, granule)) {
    STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(memory.data()) % granule.size() == 0);
  }

  std::optional<Extent> try_allocate(Bytes bytes) {
    const auto offset = home_->offsets.try_allocate(bytes);
    if (!offset) return std::nullopt;
    Extent extent;
    extent.held_ = decltype(extent.held_)(home_.get(), Extent::GiveBack{home_, *offset});
    extent.bytes_ = home_->memory.subspan(offset->size(), bytes.size());
    return extent;
  }

  Bytes capacity() const { return home_->offsets.capacity(); }
  Bytes in_use() const { return home_->offsets.in_use(); }  // with the rounding

 private:
  std::shared_ptr<Extent::Home> home_;
};

}  // namespace strata::memory
