// A part of a block: the bytes that one lease lends. Where blocks are larger than the memory that
// they are staged through, whoever works on them takes one part after the other, of several blocks
// the parts that hold the same elements. Pure arithmetic. Errors: UsageError.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>

#include "strata/base/units.h"

namespace strata::offload {

using BlockId = std::int32_t;

// The unit of a drive's reads and writes: parts begin at multiples of it, and end at one or where
// their block ends.
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

// Throws where `part` is none of the block of this name and size.
void require_part(const Part& part, std::string_view name, Bytes size);
// Throws where two of them overlap.
void require_apart(std::span<const Part> parts);

// Throws: it was wanted while this part, of the block of this name, is leased.
[[noreturn]] void throw_leased(const Part& leased, std::string_view name);

// How many elements to work on at once, where several blocks hold something of each: `bits` is what
// an element takes in each of them (32 for fp32, 1 for a flag), powers of two. As many as `budget`
// (StateStore::lease_budget()) has room for, and such that a part that begins with a multiple of
// them begins at a multiple of kPartAlignment in every block; so at least as many as one page of
// the block of the fewest bits holds, however small the budget is.
Numel elements_at_once(std::span<const int> bits, Bytes budget);

}  // namespace strata::offload
