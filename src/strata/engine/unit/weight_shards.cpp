#include "strata/engine/unit/weight_shards.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"

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

void WeightShards::add(std::span<const Unit> units) {
  std::vector<offload::BlockSpec> blocks;
  for (const Unit& unit : units) {
    if (unit.offloaded)
      blocks.push_back({unit.name(), unit.layout.shard_bytes(), memory::Kind::kWeights,
                        unit.spec.place.weights});
  }
  std::vector<offload::BlockId> ids;
  if (!blocks.empty()) ids = store_->add_all(std::move(blocks));
  auto next = ids.begin();
  for (const Unit& unit : units) {
    STRATA_ASSERT(static_cast<std::size_t>(unit.id) == blocks_.size());
    blocks_.push_back(unit.offloaded ? *next++ : -1);
  }
}

void WeightShards::for_each(int index, Numel begin, Numel end, offload::Access access,
                            const Work& work) const {
  const Unit& unit = units_[static_cast<std::size_t>(index)];
  const DType dtype = unit.layout.dtype();
  const auto bytes_between = [&](std::span<std::byte> bytes, Numel first, Numel last) {
    return bytes.subspan(bytes_of(first, dtype).size(), bytes_of(last - first, dtype).size());
  };
  if (unit.parked) offload::throw_offloaded(fmt::format("the weights of unit '{}'", unit.name()));
  if (!unit.offloaded) {
    if (begin < end) work({begin, end, bytes_between(unit.shard, begin, end), nullptr});
    return;
  }
  const StateBlock block{blocks_[static_cast<std::size_t>(index)],
                         static_cast<int>(size_of(dtype).value) * 8};
  for_each_range(
      *store_, {&block, 1}, unit.layout.shard(), begin, end, access, [&](const StateRange& range) {
        const Numel low = std::max(range.first, begin);
        const Numel high = std::min(range.end, end);
        work({low, high, bytes_between(range.bytes(0), low - range.first, high - range.first),
              range.leases.front().get()});
      });
}

}  // namespace strata::engine
