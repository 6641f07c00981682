#include "strata/comm/bulk_copy.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"

namespace strata::comm {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kStreamFrom = std::size_t{1} << 20;
constexpr std::size_t kLine = 64;
constexpr std::int64_t kGrain = std::int64_t{1} << 20;

void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine);
  std::memcpy(target, source, head);
  auto* to = reinterpret_cast<std::uint8_t*>(target + head);
  const auto* from = reinterpret_cast<const std::uint8_t*>(source + head);
  const std::size_t lines = (bytes - head) / kLine * kLine;
  for (std::size_t line = 0; line < lines; line += kLine) {
    for (std::size_t i = 0; i < kLine; i += lanes) {
      hn::Stream(hn::LoadU(d, from + line + i), d, to + line + i);
    }
  }
  std::memcpy(to + lines, from + lines, bytes - head - lines);
  hwy::FlushStream();
}

}  // namespace

void bulk_copy(std::span<std::byte> target, std::span<const std::byte> source, ThreadPool* pool) {
  STRATA_ASSERT(target.size() == source.size());
  if (target.empty()) return;
  if (target.size() < kStreamFrom) {
    std::memcpy(target.data(), source.data(), source.size());
  } else if (pool == nullptr) {
    stream_copy(target.data(), source.data(), source.size());
  } else {
    pool->parallel_for(static_cast<std::int64_t>(target.size()), kGrain,
                       [&](std::int64_t begin, std::int64_t end) {
                         stream_copy(target.data() + begin, source.data() + begin,
                                     static_cast<std::size_t>(end - begin));
                       });
  }
}

}  // namespace strata::comm
