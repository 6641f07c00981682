#include "strata/kernels/master_remainder.h"

#include <algorithm>

#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise_loops.h"

namespace strata::kernels {
namespace {

constexpr std::int64_t kGrain = 65536;

template <typename Source>
void store_scalars(const MasterRemainder& target, std::size_t first, const std::byte* source,
                   std::size_t begin, std::size_t end) {
  std::size_t i = begin;
  // Byte by byte of halves_up: one at a time would read back what the element before has written.
  for (; (first + i) % 8 == 0 && i + 8 <= end; i += 8) {
    unsigned halves = 0;
    for (std::size_t j = 0; j < 8; ++j) {
      const RemainderBits bits = remainder_of(load_element<Source>(source, i + j));
      target.low[first + i + j] = bits.low;
      halves |= static_cast<unsigned>(bits.half_up) << j;
    }
    target.halves_up[(first + i) / 8] = static_cast<std::uint8_t>(halves);
  }
  for (; i < end; ++i)
    set_remainder(target, first + i, remainder_of(load_element<Source>(source, i)));
}

// A bf16 value loses nothing.
void clear(const MasterRemainder& target, std::size_t begin, std::size_t end) {
  std::fill(target.low + begin, target.low + end, std::uint16_t{0});
  for (; begin < end && begin % 8 != 0; ++begin) set_remainder(target, begin, {});
  for (; begin < end && end % 8 != 0; --end) set_remainder(target, end - 1, {});
  std::fill(target.halves_up + begin / 8, target.halves_up + end / 8, std::uint8_t{0});
}

}  // namespace

void store_remainder(const MasterRemainder& target, Numel first, const std::byte* source,
                     DType source_dtype, Numel numel, ThreadPool* pool) {
  check_cast(DType::kBFloat16, source_dtype);
  const auto range = [&](std::int64_t from, std::int64_t to) {
    const auto begin = static_cast<std::size_t>(from);
    const auto end = static_cast<std::size_t>(to);
    if (source_dtype == DType::kBFloat16)
      return clear(target, first.size() + begin, first.size() + end);
    with_wide_storage(source_dtype, [&](auto storage) {
      store_scalars<decltype(storage)>(target, first.size(), source, begin, end);
    });
  };
  // Chunks must not share a byte of halves_up.
  const std::int64_t head = std::min((8 - first.value % 8) % 8, numel.value);
  if (head > 0) range(0, head);
  for_chunks(pool, numel.value - head, kGrain,
             [&](std::int64_t begin, std::int64_t end) { range(head + begin, head + end); });
}

void join_masters(std::span<float> masters, const std::byte* weights,
                  const MasterRemainder& remainder, Numel first) {
  for (std::size_t i = 0, at = first.size(); i < masters.size(); ++i, ++at)
    masters[i] = joined_master(element_at<BFloat16>(weights, at), remainder_at(remainder, at));
}

}  // namespace strata::kernels
