// IoEngine on io_uring. The engine cuts transfers into pieces, and keeps pieces of several
// transfers under way at once, up to a depth: when one ends, the next begins, without any caller's
// help. One thread of the engine's own submits requests and reaps their results. Waiting callers
// could reap under a lock. But while all callers compute, none of them would reap: the queue would
// run empty, and short transfers would not continue. And when a thread ends, the kernel cancels the
// requests that it has submitted. The one thread also makes the ring's state a single thread's. It
// sleeps whenever nothing has ended.
//
// Pieces through the page cache go to threads of the kernel's at once; otherwise the one thread
// would copy all cached bytes. The engine begins transfers in the order in which they came. At most
// `queue_max` wait to be begun; the next read() or write() blocks until one is. Failures are
// reported as TransferJob describes. If the kernel stops serving the queue, every transfer fails
// with that error. Threads, ownership, errors: as for IoEngine; IoError from the constructor where
// the kernel refuses io_uring (make_io_engine() takes threads then).
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

// Makes a ring for at most `depth` requests under way. IoError: the system refuses.
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

// make_io_engine() with a RingMaker that replaces the kernel's ring.
ChosenEngine make_io_engine(const EngineOptions& options, const RingMaker& make_ring);

}  // namespace strata::io
