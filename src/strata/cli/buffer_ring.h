// Buffers through which a command streams: each in use by one transfer at a time, so that reading
// and writing run beside the work on what has come. All the memory for tensors that a command
// takes, whatever the size of a model. Threads: one. Ownership: owns the buffers, charged to the
// ledger as staging, and the transfers that use them. Errors: OutOfMemoryError; IoError of a
// transfer from the call that waits for it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "strata/io/io_engine.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct RingOptions {
  std::size_t buffers = 8;
  Bytes buffer_bytes = 4_MiB;
};

class BufferRing {
 public:
  BufferRing(const RingOptions& options, const std::shared_ptr<memory::Ledger>& ledger);

  std::size_t size() const { return transfers_.size(); }
  Bytes buffer_bytes() const { return buffer_bytes_; }

  // The buffer of turn `turn` (0, 1, 2, ...; turns go round), when the transfer of the turn before
  // has ended. It begins at a page.
  std::span<std::byte> buffer(std::size_t turn);
  // The transfer that now uses the turn's buffer.
  void started(std::size_t turn, std::unique_ptr<io::Transfer> transfer);
  // Waits for the turn's transfer.
  void wait(std::size_t turn);
  // Waits for all of them.
  void drain();

 private:
  Bytes buffer_bytes_;
  Bytes stride_;
  memory::HostBuffer memory_;
  // Destroyed, and so waited for, before the memory.
  std::vector<std::unique_ptr<io::Transfer>> transfers_;
};

}  // namespace strata::cli
