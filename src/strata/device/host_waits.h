// How often the host waited for a device: calls that return only when work of it is over, whether
// or not it was over already, so that a program that does the same counts the same. Those are
// Event::wait(), Stream::synchronize(), and the freeing of memory where the driver waits for what
// runs. Not counted: a copy to memory that is not pinned, and what other libraries wait for.
// Devices of one place may share one. Threads: any. Errors: none.
#pragma once

#include <atomic>
#include <cstdint>

namespace strata::device {

class HostWaits {
 public:
  void note() { count_.fetch_add(1, std::memory_order_relaxed); }
  std::int64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> count_ = 0;
};

}  // namespace strata::device
