#include "strata/comm/host/bulk_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/comm/host/bulk_copy.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace strata::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}
#else
constexpr std::size_t kLine = 64;

void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) {
  const hn::CappedTag<std::uint8_t, kLine> d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = std::min(bytes, (kLine - past_line) % kLine);
  std::memcpy(target, source, head);
  auto* to = reinterpret_cast<std::uint8_t*>(target + head);
  const auto* from = reinterpret_cast<const std::uint8_t*>(source + head);
  const std::size_t lines = (bytes - head) / kLine * kLine;
  for (std::size_t line = 0; line < lines; line += kLine) {
    for (std::size_t i = 0; i < kLine; i += lanes)
      hn::Stream(hn::LoadU(d, from + line + i), d, to + line + i);
  }
  std::memcpy(to + lines, from + lines, bytes - head - lines);
  hwy::FlushStream();
}
#endif

}  // namespace strata::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::comm {
namespace {

HWY_EXPORT(stream_copy);

constexpr std::int64_t kGrain = std::int64_t{1} << 20;

}  // namespace

void bulk_copy(std::span<std::byte> target, std::span<const std::byte> source, CopyHint hint,
               ThreadPool* pool) {
  STRATA_ASSERT(target.size() == source.size());
  for_chunks(pool, static_cast<std::int64_t>(target.size()), kGrain,
             [&](std::int64_t begin, std::int64_t end) {
               const auto bytes = static_cast<std::size_t>(end - begin);
               if (hint == CopyHint::kPastCaches) {
                 HWY_DYNAMIC_DISPATCH(stream_copy)
                 (target.data() + begin, source.data() + begin, bytes);
               } else {
                 std::memcpy(target.data() + begin, source.data() + begin, bytes);
               }
             });
}

}  // namespace strata::comm
#endif  // HWY_ONCE
