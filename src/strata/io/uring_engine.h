// IoEngine on io_uring. It cuts transfers into pieces, and keeps pieces of several transfers under
// way, up to a depth. One thread of its own submits requests and reaps their results: if waiting
// callers did that, the queue would run empty while all of them compute, and when a thread ends,
// the kernel cancels its requests. The thread sleeps whenever nothing has ended. Pieces through the
// page cache go to threads of the kernel's at once; otherwise the one thread would copy all cached
// bytes.
//
// At most `queue_max` transfers wait to be begun; the next read() or write() blocks until one is.
// Failures are reported as TransferJob describes. If the kernel stops serving the queue, every
// transfer fails with that error. Threads, ownership, errors: as for IoEngine; IoError where the
// kernel refuses io_uring (make_io_engine() takes threads then).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/io/io_engine.h"

namespace strata::io {

// Seam: a queue of requests to read and write, and their results, like io_uring's: requests are
// pushed, submitted to the system together, and end in any order. It judges no result; the engine
// does (pending_range.h). Implementations: make_kernel_ring(); tests have one that misbehaves.
// Threads: only the engine's calls it, except wake(), which any thread may call. Ownership: borrows
// the memory and the descriptors of requests until they have ended, and registered memory. Errors:
// results of requests; begin() and wait() throw IoError if the system does not serve the queue (any
// more), and then only withdraw() and the destructor may be called.
class RequestRing : public Interface {
 public:
  struct Request {
    std::uint32_t id = 0;  // of those under way, this one's alone
    int fd = -1;
    Bytes offset;  // in the file
    std::size_t bytes = 0;
    std::byte* target = nullptr;        // of a read, else null
    const std::byte* source = nullptr;  // of a write, else null
    int region = -1;                    // the registered memory that it lies in; -1: none
    bool may_block = false;  // so the system need not try it on the engine's thread first
  };
  struct Result {
    std::uint32_t id = 0;
    std::int64_t value = 0;  // bytes moved, or -errno
  };

  // The most bytes of one region.
  static constexpr Bytes kRegionMax = 1_GiB;

  // Called once, by the thread that makes all later calls.
  virtual void begin() = 0;
  virtual void push(const Request& request) = 0;
  // Submits the pushed requests. Blocks until a request has ended, or until another thread has
  // called wake() since the last wait(); appends the results of the ended requests.
  virtual void wait(std::vector<Result>& results) = 0;
  // Ends the use of the ring after an error on either side. The system never gets the requests that
  // were not submitted; the others are cancelled where possible. When this returns, the system no
  // longer reads or writes memory of a request, however long that takes; there are no results.
  virtual void withdraw() noexcept = 0;
  virtual void wake() = 0;
  // Registers memory under a number, from 0 on. Returns 0, or an errno.
  virtual int register_region(int region, std::span<std::byte> memory) = 0;
  virtual void unregister_region(int region) = 0;
  virtual int regions_max() const = 0;
};

// A ring on the kernel's io_uring, through liburing. One thread alone queues requests, submits
// them and reaps their results, so the kernel needs no lock and interrupts no other thread
// (SINGLE_ISSUER, DEFER_TASKRUN, where it has them). A request that may block goes to a thread of
// the kernel's at once. wake() writes to an eventfd that a request always reads, so waiting is one
// system call. Files are not registered: that would only save counting their users, which takes
// nanoseconds of a request that moves a MiB. Threads, ownership: as for RequestRing. Errors: also
// IoError here where the kernel refuses io_uring, with the likely reason.
// At most `depth` requests are under way at once.
std::unique_ptr<RequestRing> make_kernel_ring(int depth);
// The same function, and those that replace it in tests.
using RingMaker = std::function<std::unique_ptr<RequestRing>(int depth)>;

// UsageError if an option is not positive, or too large for any ring. Tests replace the kernel's
// ring.
std::unique_ptr<IoEngine> make_uring_engine(const EngineOptions& options,
                                            const RingMaker& make_ring = make_kernel_ring);

}  // namespace strata::io
