// A few buffers of host memory through which files and shards exchange bytes, so that reading or
// writing the next piece runs while the present one is cast or copied. All the host memory that
// loading and saving take, whatever the model's size. Threads: one thread. Ownership: owns the
// buffers, charged to the ledger as staging, and the transfers that use them: a buffer is not given
// again, nor freed, before its transfer has ended. Errors: OutOfMemoryError; IoError of a transfer,
// from the call that waits for it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/io/io_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::engine {

struct StagingOptions {
  int buffers = 4;
  Bytes buffer_bytes = 4_MiB;
};

class StagingRing {
 public:
  // UsageError if an option is not positive.
  StagingRing(const StagingOptions& options, const std::shared_ptr<memory::Ledger>& ledger);
  // Waits for the transfers, and drops their errors.
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  std::size_t size() const { return slots_.size(); }
  Bytes buffer_bytes() const { return buffer_bytes_; }

  // The buffer of turn `turn` (0, 1, 2, ...; turns go round), when the transfer of the turn before
  // has ended.
  std::span<std::byte> buffer(std::size_t turn);
  // The transfer that now uses the turn's buffer.
  void started(std::size_t turn, std::unique_ptr<io::Transfer> transfer);
  // Waits for all transfers.
  void drain();

 private:
  struct Slot {
    memory::HostBuffer memory;
    std::unique_ptr<io::Transfer> transfer;  // destroyed, and so waited for, before the memory
  };
  Slot& slot(std::size_t turn) { return slots_[turn % slots_.size()]; }
  static void wait(Slot& slot);

  Bytes buffer_bytes_;
  std::vector<Slot> slots_;
};

}  // namespace strata::engine
