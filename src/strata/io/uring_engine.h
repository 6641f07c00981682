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

#include <memory>

#include "strata/io/io_engine.h"
#include "strata/io/request_ring.h"

namespace strata::io {

// UsageError if an option is not positive, or too large for any ring. Tests replace the kernel's
// ring.
std::unique_ptr<IoEngine> make_uring_engine(const EngineOptions& options,
                                            const RingMaker& make_ring = make_kernel_ring);

}  // namespace strata::io
