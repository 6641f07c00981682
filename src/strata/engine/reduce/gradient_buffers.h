// Flat gradient buffers: memory that peers can read. A unit takes one when its first gradient
// arrives, and gives it back when its reduction has ended. Free buffers are kept by exact size
// (units repeat), so after the first passes nothing is allocated. The number in use at once depends
// on when reductions end; so as many are kept as the busiest of the last passes used, and the
// others are freed. The first pass does not count once there is another: its order is not known
// before, so it may need many more.
// Threads: one thread at a time. Ownership: a Buffer goes back to its pool, which must outlive it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/memory/ledger.h"

namespace strata::engine {

class GradientBuffers {
 public:
  struct Allocation {
    std::unique_ptr<comm::SharedBuffer> memory;
    memory::Charge charge;
    // The end of this rank's part of the reduction that reads the memory, if that part runs on a
    // stream; null: there is nothing to wait for.
    std::unique_ptr<device::Event> read = nullptr;
  };
  using Buffer = std::unique_ptr<Allocation>;  // null: none

  GradientBuffers(std::string name, comm::Collectives& collectives,
                  std::shared_ptr<memory::Ledger> ledger)
      : name_(std::move(name)), collectives_(collectives), ledger_(std::move(ledger)) {}

  Buffer take(Bytes bytes);
  void give_back(Buffer buffer);
  void end_pass();
  // Frees all buffers that are not in use.
  void free_unused();
  int allocations() const { return allocations_; }

 private:
  std::string name_;
  comm::Collectives& collectives_;
  std::shared_ptr<memory::Ledger> ledger_;
  static constexpr std::size_t kPasses = 16;  // that decide how many are kept
  struct Size {
    std::vector<Buffer> free;
    std::size_t in_use = 0;
    std::size_t most_in_use = 0;                // since the last end_pass()
    std::array<std::size_t, kPasses> recent{};  // by pass: the most in use
  };
  std::map<std::size_t, Size> sizes_;  // by bytes
  int allocations_ = 0;
  std::size_t passes_ = 0;
};

}  // namespace strata::engine
