#include "strata/offload/state_shelf.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::offload {

BlockId StateShelf::add(std::string name, Bytes bytes) {
  return store_
      .add_all({{std::move(name), bytes, memory::Kind::kOptimizerState, memory::Tier::kNvme}})
      .front();
}

template <typename Copy>
void StateShelf::for_each_part(BlockId block, std::size_t bytes, Access access, Copy&& copy) {
  const Bytes all = store_.size_of(block);
  if (Bytes(bytes) != all) {
    throw UsageError(fmt::format("a state of the optimizer on a drive has {} bytes; found {}",
                                 all.value, bytes));
  }
  const Bytes budget = store_.lease_budget(block);
  const Bytes most = std::max(kPartAlignment, budget - budget % kPartAlignment);
  for (Bytes at; at < all;) {
    const Bytes end = most < all - at ? at + most : all;
    const auto lease = store_.fetch(Part{block, at, end}, access);
    copy(at, lease->bytes().first((end - at).size()));
    at = end;
  }
}

void StateShelf::put(BlockId block, std::span<const std::byte> values) {
  for_each_part(block, values.size(), Access::kReadWrite, [&](Bytes at, std::span<std::byte> part) {
    std::ranges::copy(values.subspan(at.size(), part.size()), part.begin());
  });
}

void StateShelf::bring(BlockId block, std::span<std::byte> values) {
  for_each_part(block, values.size(), Access::kRead, [&](Bytes at, std::span<std::byte> part) {
    std::ranges::copy(part, values.subspan(at.size(), part.size()).begin());
  });
}

}  // namespace strata::offload
