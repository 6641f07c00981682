// Gives out ranges [offset, offset + size) of a fixed space that it never touches, such as memory
// of an arena. Best fit: the smallest free range that suffices, the lowest offset among equals;
// freed ranges are joined with their free neighbours at once, so that no two free ranges ever
// touch. Cost: O(log n) in the number of ranges. Threads: one at a time. Units: bytes; sizes are
// rounded up to the granule, and so are offsets. Errors: none but InternalError for a range that is
// not held; a release never allocates.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/units.h"

namespace strata::memory {

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
    return by_offset.extract(by_offset.emplace(offset, Range{size, by_size.extract(sized)}).first);
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

}  // namespace strata::memory
