// Extents of any size out of one fixed span of memory: staging buffers for transfers, sized by the
// tensors that pass through. Nothing is allocated but bookkeeping, and the span is never exceeded.
// Threads: internally synchronised; extents may be made and given back on different threads.
// Ownership: the span belongs to the caller and outlives the extents; extents may outlive the
// arena.
// Units: sizes are rounded up to the granule, so that every extent is aligned to it.
// Errors: none; try_allocate returns nullopt when no free piece is large enough, and the caller
// waits, streams in smaller pieces, or writes the message.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

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
  OffsetAllocator(Bytes capacity, Bytes granule);

  // Offset of a range of at least `size` bytes (0 takes one granule); nullopt when no free range
  // holds it.
  std::optional<Bytes> try_allocate(Bytes size);
  void release(Bytes offset);

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

  static ByOffset::node_type make_held(Bytes offset, Bytes size);
  void put_free(ByOffset::iterator range);

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
  struct Home;
  struct GiveBack {
    std::shared_ptr<Home> home;
    Bytes offset;
    void operator()(Home*) const noexcept;
  };

  std::unique_ptr<Home, GiveBack> held_;  // null: holds nothing
  std::span<std::byte> bytes_;
};

class Arena {
 public:
  static constexpr Bytes kDefaultGranule = 256_B;

  // `memory` begins at a multiple of `granule`, a power of two.
  explicit Arena(std::span<std::byte> memory, Bytes granule = kDefaultGranule);

  std::optional<Extent> try_allocate(Bytes bytes);

  Bytes capacity() const;
  Bytes in_use() const;  // with the rounding

 private:
  std::shared_ptr<Extent::Home> home_;
};

}  // namespace strata::memory
