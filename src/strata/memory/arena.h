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
#include <memory>
#include <optional>
#include <span>

#include "strata/base/units.h"

namespace strata::memory {

// A piece of an arena; given back by the destructor. Movable.
class Extent {
 public:
  Extent() = default;
  Extent(Extent&& other) noexcept;
  Extent& operator=(Extent&& other) noexcept;
  ~Extent();
  std::span<std::byte> bytes() const { return bytes_; }  // exactly as many as asked for

 private:
  friend class Arena;
  struct Home;
  Extent(std::shared_ptr<Home> home, Bytes offset, std::span<std::byte> bytes);
  void give_back() noexcept;

  std::shared_ptr<Home> home_;  // null: holds nothing
  Bytes offset_;
  std::span<std::byte> bytes_;
};

class Arena {
 public:
  static constexpr Bytes kDefaultGranule = 256_B;

  // `memory` begins at a multiple of `granule`, a power of two.
  explicit Arena(std::span<std::byte> memory, Bytes granule = kDefaultGranule);

  // `alignment` is a power of two that the address of the span is a multiple of.
  std::optional<Extent> try_allocate(Bytes bytes, Bytes alignment = 1_B);

  Bytes capacity() const;
  Bytes in_use() const;          // with the rounding
  Bytes largest_free() const;    // what one extent can get now
  double fragmentation() const;  // share of the free bytes outside the largest free piece

 private:
  std::shared_ptr<Extent::Home> home_;
};

}  // namespace strata::memory
