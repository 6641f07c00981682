#include "strata/comm/host/control_block.h"

#include <fmt/core.h>
#include <hwy/cache_control.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <climits>

#include "strata/base/dtype.h"

namespace strata::comm {

// The word must be a futex in memory shared between processes.
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

void Doorbell::ring() noexcept {
  // Sequentially consistent on both sides: either the sleeper sees the new count, or we see it
  // sleep.
  rings_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Doorbell::wait(std::uint32_t heard, std::chrono::milliseconds period, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (count() != heard) return;
    hwy::Pause();
  }
  sleeping_.store(1, std::memory_order_seq_cst);
  if (rings_.load(std::memory_order_seq_cst) == heard) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(period);
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(seconds.count());
    limit.tv_nsec = static_cast<long>(std::chrono::nanoseconds(period - seconds).count());
    ::syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &limit, nullptr, 0);
  }
  sleeping_.store(0, std::memory_order_relaxed);
}

bool same_operation(const OperationEntry& a, const OperationEntry& b) {
  return a.kind == b.kind && a.detail == b.detail && a.count == b.count && a.tag_hash == b.tag_hash;
}

std::string describe(const OperationEntry& entry) {
  constexpr std::array<std::string_view, 3> kOps = {"sum", "min", "max"};
  const std::string tag(entry.tag.begin(), std::find(entry.tag.begin(), entry.tag.end(), '\0'));
  switch (entry.kind) {
    case OperationKind::kReduceScatter:
      return fmt::format("reduce_scatter of '{}' ({} elements of {} a rank)", tag, entry.count,
                         name_of(static_cast<DType>(entry.detail)));
    case OperationKind::kAllReduce:
      return fmt::format("all_reduce of {} values ({})", entry.count,
                         kOps[std::min<std::size_t>(entry.detail, kOps.size() - 1)]);
    case OperationKind::kBroadcast:
      return fmt::format("broadcast of {} bytes from rank {}", entry.count, entry.detail);
    case OperationKind::kText:
      return "all_gather_text";
    case OperationKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

void set_tag(OperationEntry& entry, std::string_view tag) {
  entry.tag_hash = id_of(tag);
  entry.tag = {};
  std::copy_n(tag.begin(), std::min(tag.size(), kTagChars), entry.tag.begin());
}

std::uint64_t id_of(std::string_view name) {
  return std::max<std::uint64_t>(XXH3_64bits(name.data(), name.size()), 1);
}

}  // namespace strata::comm
