// A few buffers, extents of one piece of pinned host memory, through which files and shards
// exchange bytes, so that reading or writing the next piece runs while the present one is cast or
// copied. Each begins at a block of direct reads (io::File::kDirectBlock), unless it is smaller
// than one. All the host memory that loading and saving take, whatever the model's size. Threads:
// one thread. Ownership: owns the buffers, charged to the ledger as staging, and the transfers that
// use them: a buffer is not given again, nor freed, before its transfer, and what a stream still
// reads of it, has ended. Errors: OutOfMemoryError; IoError of a transfer, from the call that waits
// for it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/io/io_engine.h"
#include "strata/memory/arena.h"

namespace strata::engine {

// Deep enough that several reads and copies are under way at once; a buffer is large enough to move
// at the speed of a link. All of a host's rings together fit the last cache of its processors: what
// is read from the page cache into larger ones goes through the memory three times instead of once,
// and takes twice as long.
struct StagingOptions {
  int buffers = 12;
  Bytes buffer_bytes = 4_MiB;
};

class StagingRing {
 public:
  // The memory of a ring with these options.
  static Bytes room(const StagingOptions& options);
  // Tells a device that a ring with these options will be made: it makes its memory beside the
  // caller.
  static void expect(const StagingOptions& options, device::Device& device);
  // UsageError if an option is not positive.
  StagingRing(const StagingOptions& options, device::Device& device);
  // Waits for the transfers, and drops their errors.
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  std::size_t size() const { return slots_.size(); }
  Bytes buffer_bytes() const { return buffer_bytes_; }

  // The buffer of turn `turn` (0, 1, 2, ...; turns go round), when the transfer of the turn before
  // has ended.
  std::span<std::byte> buffer(std::size_t turn);
  // The same, of a turn whose buffer was given and is in use by nobody.
  std::span<std::byte> filled(std::size_t turn) { return slot(turn).memory.bytes(); }
  // The transfer that now uses the turn's buffer.
  void started(std::size_t turn, std::unique_ptr<io::Transfer> transfer);
  // Work queued on a stream reads the turn's buffer until `event`.
  void used_until(std::size_t turn, std::unique_ptr<device::Event> event);
  // Waits for all transfers.
  void drain();
  // The same for transfers and what streams read, without their errors.
  void abandon() noexcept;

 private:
  struct Slot {
    memory::Extent memory;
    std::unique_ptr<device::Event> event;    // null: nothing queued reads the memory
    std::unique_ptr<io::Transfer> transfer;  // destroyed, and so waited for, before the memory
  };
  Slot& slot(std::size_t turn) { return slots_[turn % slots_.size()]; }
  static void wait(Slot& slot);

  Bytes buffer_bytes_;
  std::unique_ptr<device::HostMemory> memory_;  // pinned at once, which costs less than in parts
  std::vector<Slot> slots_;
};

}  // namespace strata::engine
