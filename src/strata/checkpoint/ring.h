// A ring of equal buffers through which bytes travel between files, the host and a device. A buffer
// is neither handed out again nor freed before its last use has ended: a transfer, work queued on a
// stream (an event), or both. Each begins at a block of direct transfers (io::File::kDirectBlock),
// unless it is smaller than one.
//
// Threads: one thread. Ownership: owns the buffers, charged to the ledger as staging, and the
// transfers and events of their uses. Errors: OutOfMemoryError; UsageError for options that make no
// ring; errors of a transfer, from the call that waits for it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/io/io_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::checkpoint {

// By default the rings of all ranks of a host fit the last-level cache of its processors: bytes
// that are read from the page cache into larger rings cross the memory bus three times instead of
// once, and take twice as long. The buffers are large enough for the speed of a link.
struct RingOptions {
  int buffers = 12;
  Bytes buffer_bytes = 4_MiB;
};

class TransferRing {
 public:
  // The memory that a ring with these options takes.
  static Bytes room(const RingOptions& options);
  // Announces such a ring to a device, which then makes its memory beside the caller.
  static void expect(const RingOptions& options, device::Device& device);

  // Pinned host memory of a device.
  TransferRing(const RingOptions& options, device::Device& device);
  // Pageable host memory. `ledger`: null charges nothing.
  TransferRing(const RingOptions& options, const std::shared_ptr<memory::Ledger>& ledger);
  // Memory of the caller's, which outlives the ring: its pieces of `buffer_bytes`, the last one
  // smaller. It begins at a block.
  TransferRing(std::span<std::byte> memory, Bytes buffer_bytes);
  // Waits for all uses and drops their errors.
  ~TransferRing();

  std::size_t size() const { return uses_.size(); }
  Bytes buffer_bytes() const { return buffer_bytes_; }

  // Takes the next turn (0, 1, 2, ...), and waits until the earlier use of its buffer has ended.
  std::size_t next();
  // The buffer of a turn; turns go round.
  std::span<std::byte> buffer(std::size_t turn);
  // The transfer that uses the buffer from now on.
  void started(std::size_t turn, std::unique_ptr<io::Transfer> transfer);
  // Work that was queued on a stream uses the buffer until `event`.
  void used_until(std::size_t turn, std::unique_ptr<device::Event> event);
  // Runs `work`, which queues uses of the buffer on a stream, and records the event behind them,
  // also where it throws. `stream`: null records none.
  void queue(std::size_t turn, device::Stream* stream, const std::function<void()>& work);
  // Waits for the use of a buffer, or of all.
  void wait(std::size_t turn);
  void drain();
  // As drain(), and drops errors.
  void abandon() noexcept;

 private:
  struct Use {
    std::unique_ptr<io::Transfer> transfer;  // null: none
    std::unique_ptr<device::Event> event;    // null: nothing queued uses the buffer
  };
  Use& use(std::size_t turn) { return uses_[turn % uses_.size()]; }

  Bytes buffer_bytes_;
  Bytes stride_;
  std::unique_ptr<device::HostMemory> pinned_;
  memory::HostBuffer pageable_;
  std::span<std::byte> memory_;  // of one of the two, or the caller's
  std::vector<Use> uses_;
  std::size_t turns_ = 0;
};

}  // namespace strata::checkpoint
