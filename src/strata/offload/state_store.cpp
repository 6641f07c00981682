#include "strata/offload/state_store.h"

#include <bit>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

constexpr std::int64_t kBitsInByte = 8;

}  // namespace

void require_part(const Part& part, std::string_view name, Bytes size) {
  if (part.begin.value < 0 || part.end < part.begin || part.end > size)
    throw UsageError("block '{}' has no such part: bytes [{}, {}) of {}", name, part.begin.value,
                     part.end.value, size.value);
  if (part.begin % kPartAlignment != Bytes() ||
      (part.end % kPartAlignment != Bytes() && part.end != size)) {
    throw UsageError(
        "parts begin and end at multiples of {}, or at the end of their block "
        "(offload::elements_at_once() finds such): bytes [{}, {}) of block '{}'",
        kPartAlignment.value, part.begin.value, part.end.value, name);
  }
}

void require_apart(std::span<const Part> parts) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!parts[i].overlaps(parts[j])) continue;
      throw UsageError(
          "parts that are fetched together overlap: bytes [{}, {}) and [{}, {}) of block {}",
          parts[j].begin.value, parts[j].end.value, parts[i].begin.value, parts[i].end.value,
          parts[i].block);
    }
  }
}

void throw_leased(const Part& leased, std::string_view name) {
  throw UsageError(
      "block '{}' is leased already: give its lease back before it is fetched again; block {}, "
      "bytes [{}, {})",
      name, leased.block, leased.begin.value, leased.end.value);
}

Numel elements_at_once(std::span<const int> bits, Bytes budget) {
  STRATA_ASSERT(!bits.empty());
  std::int64_t all = 0;
  int fewest = bits.front();
  for (const int of_one : bits) {
    STRATA_ASSERT(of_one > 0 && std::has_single_bit(static_cast<unsigned>(of_one)));
    all += of_one;
    fewest = std::min(fewest, of_one);
  }
  const std::int64_t step = std::max<std::int64_t>(kPartAlignment.value * kBitsInByte / fewest, 1);
  // `all` divides first: a budget without a bound must not overflow.
  const std::int64_t fitting =
      budget.value / all > INT64_MAX / kBitsInByte ? INT64_MAX : budget.value / all * kBitsInByte;
  return Numel(std::max(fitting / step, std::int64_t{1}) * step);
}

namespace {

template <typename Copy>
void for_each_part(StateStore& store, BlockId block, std::size_t bytes, Access access,
                   const Copy& copy) {
  const Bytes all = store.size_of(block);
  if (Bytes(bytes) != all)
    throw UsageError("a state of the optimizer on a drive has {} bytes; found {}", all.value,
                     bytes);
  const Bytes budget = store.lease_budget(block);
  const Bytes most = std::max(kPartAlignment, budget - budget % kPartAlignment);
  for (Bytes at; at < all;) {
    const Bytes end = most < all - at ? at + most : all;
    const auto lease = store.fetch(Part{block, at, end}, access);
    copy(at.size(), lease->bytes().first((end - at).size()));
    at = end;
  }
}

}  // namespace

void StateStore::put(BlockId block, std::span<const std::byte> values) {
  for_each_part(*this, block, values.size(), Access::kReadWrite,
                [&](std::size_t at, std::span<std::byte> part) {
                  std::ranges::copy(values.subspan(at, part.size()), part.begin());
                });
}

void StateStore::bring(BlockId block, std::span<std::byte> values) {
  for_each_part(*this, block, values.size(), Access::kRead,
                [&](std::size_t at, std::span<std::byte> part) {
                  std::ranges::copy(part, values.subspan(at).begin());
                });
}

}  // namespace strata::offload
