// Seam: positional reads and writes. Implementations: thread_engine (pread/pwrite on a pool);
// io_uring later.
//
// A transfer is complete or it failed: short transfers are continued, EINTR is retried, and
// whatever remains surfaces as IoError (path, offset, wanted, got, errno) from wait(). Reading past
// the end of the file is an IoError, not a short read. After a failure the target's content, or the
// file's in the range of the write, is unspecified. Threads: internally synchronised; transfers of
// one engine run in no particular order, so two that overlap in file or memory must be separated by
// wait(). read() and write() may block while the engine's queue is full. One Transfer belongs to
// one thread at a time. A File with a descriptor for direct transfers gives the same bytes, offsets
// and memory may lie anywhere; only what lies at blocks in both goes past the page cache, so that
// whoever wants that uses whole blocks of aligned memory. Ownership: the File and the memory
// must outlive the Transfer's wait(). ~Transfer waits and drops errors. An engine finishes what it
// was given before it is destroyed; a Transfer may outlive it. Errors: UsageError at once for a
// range that no file can have (negative offset, end beyond 2^63).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "strata/base/units.h"
#include "strata/io/file.h"

namespace strata::io {

class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool done() = 0;
  // Throws IoError; called again, it reports the same.
  virtual void wait() = 0;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;
  virtual std::unique_ptr<Transfer> read(const File& file, Bytes offset,
                                         std::span<std::byte> target) = 0;
  virtual std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                          std::span<const std::byte> source) = 0;
};

}  // namespace strata::io
