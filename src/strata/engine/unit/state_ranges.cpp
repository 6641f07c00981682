#include "strata/engine/unit/state_ranges.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/offload/part.h"

namespace strata::engine {
namespace {

// Bits are whole bytes where a range ends, but for the last one of a shard.
Bytes bytes_of_elements(const StateBlock& block, Numel numel) {
  return Bytes((numel.value * block.bits + 7) / 8);
}

}  // namespace

void for_each_range(offload::StateStore& store, std::span<const StateBlock> blocks, Numel numel,
                    Numel begin, Numel end, offload::Access access,
                    const std::function<void(const StateRange&)>& work, Bytes limit) {
  STRATA_ASSERT(!blocks.empty() && begin <= end && end <= numel);
  if (begin == end) return;
  std::vector<int> bits;
  for (const StateBlock& block : blocks) bits.push_back(block.bits);
  const Numel least = offload::elements_at_once(bits, Bytes());
  const Bytes lent = store.lease_budget(blocks.front().id);
  const Numel most = offload::elements_at_once(bits, std::min(lent, limit));
  const Numel last = least < numel - end
                         ? Numel((end.value + least.value - 1) / least.value * least.value)
                         : numel;
  for (Numel first = Numel(begin.value / least.value * least.value); first < end;) {
    const Numel until = most < last - first ? first + most : last;
    std::vector<offload::Part> parts;
    for (const StateBlock& block : blocks) {
      const Bytes from = bytes_of_elements(block, first);
      const Bytes to = until == numel ? store.size_of(block.id) : bytes_of_elements(block, until);
      parts.push_back({block.id, from, to});
    }
    const auto leases = store.fetch_all(parts, access);
    work({first, until, leases});
    first = until;
  }
}

}  // namespace strata::engine
