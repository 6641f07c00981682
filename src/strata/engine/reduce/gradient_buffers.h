// Flat gradient buffers: memory that peers can read, taken when a unit's first gradient arrives and
// given back when its reduction is done. Buffers are kept for reuse by exact size (units repeat),
// so after the first passes nothing is allocated. How many are in use at once depends on when
// reductions end, so those of the busiest of the last passes are kept; the others are freed. The
// first pass does not count once there is another: in an unforeseen order it may need many more.
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
    // Of this rank's part of the reduction that reads it, where that runs on a stream; null: of
    // none that somebody has to wait for.
    std::unique_ptr<device::Event> read = nullptr;
  };
  using Buffer = std::unique_ptr<Allocation>;  // null: none

  GradientBuffers(std::string name, comm::Collectives& collectives,
                  std::shared_ptr<memory::Ledger> ledger)
      : name_(std::move(name)), collectives_(collectives), ledger_(std::move(ledger)) {}

  Buffer take(Bytes bytes);
  void give_back(Buffer buffer);
  void end_pass();
  // Frees what nobody has taken.
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
