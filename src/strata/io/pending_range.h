// The rest of a positional transfer, or of one piece of it, and the one place that reads the result
// of a system call: accept() continues after a short transfer, retries EINTR, and EAGAIN a number
// of times, and turns everything else into an IoError with path, offset, wanted and got. Every
// engine drives its transfers through it. If the file has a descriptor for direct transfers, bytes
// at whole blocks in both file and memory go through that. The other bytes go through the page
// cache; so do all bytes if the system refuses direct transfers. Threads: one thread. Ownership:
// borrows the File and the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/units.h"
#include "strata/io/file.h"
#include "strata/io/system_calls.h"

namespace strata::io {

class PendingRange {
 public:
  // Throw UsageError if no file can have the range.
  static PendingRange reading(const File& file, Bytes offset, std::span<std::byte> target);
  static PendingRange writing(const File& file, Bytes offset, std::span<const std::byte> source);

  // The part [begin, begin + bytes) of this range. Its errors describe the whole transfer: `got`
  // counts from the transfer's first byte.
  PendingRange piece(Bytes begin, Bytes bytes) const;

  Bytes wanted() const { return end_ - begin_; }
  bool complete() const { return next_ == end_; }
  // The bytes before the first block of the file, if there is a descriptor for direct transfers.
  Bytes to_direct_block() const;
  // The next call of an incomplete transfer.
  struct Call {
    int fd;
    Bytes offset;  // in the file
    std::size_t bytes;
    bool direct;
  };
  Call next_call() const;
  bool reading() const { return source_ == nullptr; }
  // The target of a read's next call, or the source of a write's; the other one is null.
  std::byte* target() const { return reading() ? target_ + next_.value : nullptr; }
  const std::byte* source() const { return reading() ? nullptr : source_ + next_.value; }
  // Whether the last call returned EAGAIN: the next one should be allowed to wait.
  bool told_to_wait() const { return waits_ > 0; }
  // Takes the result of that call (bytes moved, or -errno). Throws IoError.
  void accept(const Call& call, std::int64_t result);
  // Makes calls until the range is complete.
  void run(SystemCalls& calls);

 private:
  PendingRange(const File& file, Bytes offset, std::byte* target, const std::byte* source,
               Bytes bytes);
  [[noreturn]] void fail(const char* what, int code) const;

  const File* file_;
  std::byte* target_;         // first byte of the transfer; null for a write
  const std::byte* source_;   // the same for a write; null for a read
  Bytes offset_;              // of the transfer in the file
  Bytes bytes_;               // of the transfer
  Bytes begin_, next_, end_;  // of this range, relative to the transfer
  int waits_ = 0;             // EAGAIN in a row
  bool direct_ = false;       // whether direct transfers have not been refused
};

// One complete transfer on the calling thread.
void read_fully(const File& file, Bytes offset, std::span<std::byte> target);
void write_fully(const File& file, Bytes offset, std::span<const std::byte> source);

}  // namespace strata::io
