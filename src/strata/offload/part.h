// A part of a block: the bytes of one lease. Where blocks are larger than their staging memory, a
// caller works on one part after the other. A caller that works on several blocks takes the parts
// that hold the same elements. Pure arithmetic. Errors: UsageError.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>

#include "strata/base/units.h"

namespace strata::offload {

using BlockId = std::int32_t;

// The unit of a drive's reads and writes: a part begins at a multiple of it, and ends at a multiple
// or at the end of its block.
inline constexpr Bytes kPartAlignment = 4_KiB;

// Bytes [begin, end) of a block.
struct Part {
  BlockId block = -1;
  Bytes begin;
  Bytes end;

  constexpr Bytes bytes() const { return end - begin; }
  // Whether both have a byte in common.
  constexpr bool overlaps(const Part& other) const {
    return block == other.block && std::max(begin, other.begin) < std::min(end, other.end);
  }
  constexpr bool operator==(const Part&) const = default;
  constexpr bool operator<(const Part& other) const {
    return std::tie(block, begin, end) < std::tie(other.block, other.begin, other.end);
  }
};

// Throws unless `part` lies in the block of this name and size.
void require_part(const Part& part, std::string_view name, Bytes size);
// Throws if two of them overlap.
void require_apart(std::span<const Part> parts);

// Throws the error of a fetch that overlaps `leased`, a part of the block of this name.
[[noreturn]] void throw_leased(const Part& leased, std::string_view name);

// How many elements to work on at once, where several blocks hold something of each element.
// `bits`: what an element takes in each block (32 for fp32, 1 for a flag), powers of two. The
// result is as large as `budget` (StateStore::lease_budget()) allows. A part that begins at a
// multiple of it begins at a multiple of kPartAlignment in every block. So it is at least the
// number of elements in one page of the block with the fewest bits, even if the budget is smaller.
Numel elements_at_once(std::span<const int> bits, Bytes budget);

}  // namespace strata::offload
