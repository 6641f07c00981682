#include "strata/io/page_cache.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace strata::io {
namespace {

// cachestat(2), Linux 6.5 and newer, has no wrapper in most C libraries. The number and the
// structures are the same everywhere.
constexpr long kCachestat = 451;

struct CacheRange {
  std::uint64_t offset;
  std::uint64_t bytes;
};

struct CacheCounts {
  std::uint64_t cached;
  std::uint64_t dirty;
  std::uint64_t writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

}  // namespace

std::optional<bool> in_page_cache(const File& file, Bytes offset) {
  // First the one that only looks.
  CacheRange range{static_cast<std::uint64_t>(offset.value), 1};
  CacheCounts counts{};
  if (::syscall(kCachestat, file.fd(), &range, &counts, 0U) == 0) return counts.cached > 0;
  // Reads nothing that is not there, but may begin to fetch it.
  std::byte byte{};
  const iovec target{&byte, 1};
  const ssize_t got = ::preadv2(file.fd(), &target, 1, offset.value, RWF_NOWAIT);
  if (got > 0) return true;
  if (got < 0 && errno == EAGAIN) return false;
  return std::nullopt;
}

}  // namespace strata::io
