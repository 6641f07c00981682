#include "strata/comm/host/doorbell.h"

#include <hwy/cache_control.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

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

}  // namespace strata::comm
