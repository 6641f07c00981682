// A counter that sleepers can wait on, in memory that several threads or processes share. A thread
// that changes a state for which a rank may wait rings that rank's bell afterwards.
// Protocol of the owner: heard = bell.count(); look at the state; if it is not there,
// bell.wait(heard). A ring after count() makes wait() return at once, so no change is missed.
// Threads: any number ring, one waits. Zeroed memory is a valid bell.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace strata::comm {

class Doorbell {
 public:
  std::uint32_t count() const { return rings_.load(std::memory_order_acquire); }
  void ring() noexcept;
  // Returns when the count is no longer `heard`, or after about `period`, or without a reason.
  // Spins `spins` times before it sleeps.
  void wait(std::uint32_t heard, std::chrono::milliseconds period, int spins);

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> sleeping_{0};
};

}  // namespace strata::comm
