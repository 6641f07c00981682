// IoEngine on io_uring. Transfers are cut into pieces, and pieces of as many transfers as it takes
// are under way at once, up to a depth: when one ends the next begins, whoever waits for what. One
// thread of the engine's own hands requests over and reaps them. Waiting threads could reap under a
// lock; but then nobody would when all compute, so that the queue ran empty and short transfers
// stayed short; and the kernel cancels what a thread has handed over when that thread ends. The one
// thread also makes the ring's state a single thread's. It sleeps whenever nothing has ended.
//
// Pieces through the page cache go to threads of the kernel's at once, since copies of cached bytes
// would otherwise be made by the one thread. Transfers are begun in the order they came. At most
// `queue_max` wait to be begun; the next read() or write() blocks until one is. A failure is
// reported as TransferJob says. Should the kernel stop serving the queue, every transfer fails with
// that. Threads, ownership, errors: as IoEngine says; IoError from the constructor where the kernel
// refuses io_uring (engine_choice.h takes threads then).
#pragma once

#include <functional>
#include <memory>

#include "strata/io/io_engine.h"
#include "strata/io/pending_range.h"
#include "strata/io/request_ring.h"

namespace strata::io {

struct UringEngineOptions {
  Bytes piece = 1_MiB;
  int depth = 32;  // pieces under way
  int queue_max = 64;
};

// Makes a ring for so many requests under way. IoError: the system refuses.
using RingMaker = std::function<std::unique_ptr<RequestRing>(int depth)>;

class UringEngine final : public IoEngine {
 public:
  // UsageError if an option is not positive, or too large for any ring.
  explicit UringEngine(const UringEngineOptions& options = {});
  UringEngine(const UringEngineOptions& options, const RingMaker& make_ring);
  ~UringEngine() override;
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  std::string_view name() const override { return "io_uring"; }
  std::unique_ptr<Transfer> read(const File& file, Bytes offset,
                                 std::span<std::byte> target) override;
  std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                  std::span<const std::byte> source) override;
  std::unique_ptr<MemoryRegistration> register_memory(std::span<std::byte> memory) override;

 private:
  class Core;
  class Registration;
  std::unique_ptr<Transfer> start(const PendingRange& range);

  UringEngineOptions options_;
  std::shared_ptr<Core> core_;
};

}  // namespace strata::io
