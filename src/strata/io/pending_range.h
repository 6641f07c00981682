// The rest of a positional transfer, or of one piece of it, and the one place that reads the result
// of a system call: accept() continues after a short transfer, retries EINTR, and EAGAIN a number
// of times, and turns everything else into an IoError with path, offset, wanted and got. Every
// engine drives its transfers through it. If the file has a descriptor for direct transfers, bytes
// at whole blocks in both file and memory go through that. The other bytes go through the page
// cache; so do all bytes if the system refuses direct transfers. Threads: one thread. Ownership:
// borrows the File and the memory.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/io/file.h"
#include "strata/io/io_engine.h"

namespace strata::io {

// The two system calls that move bytes. Tests override them to inject rare results of a kernel:
// short transfers, EINTR, EIO, ENOSPC. Threads: several threads call it at once.
// Errors: returned, never thrown.
class SystemCalls : public Interface {
 public:
  // As pread(2) and pwrite(2): they return the bytes moved, or -errno.
  virtual std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) {
    const ssize_t moved = ::pread(fd, target.data(), target.size(), offset.value);
    return moved >= 0 ? moved : -errno;
  }
  virtual std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) {
    const ssize_t moved = ::pwrite(fd, source.data(), source.size(), offset.value);
    return moved >= 0 ? moved : -errno;
  }
};

class PendingRange {
 public:
  // Throw UsageError if no file can have the range.
  static PendingRange reading(const File& file, Bytes offset, std::span<std::byte> target) {
    return PendingRange(file, offset, target.data(), nullptr, Bytes(target.size()));
  }
  static PendingRange writing(const File& file, Bytes offset, std::span<const std::byte> source) {
    return PendingRange(file, offset, nullptr, source.data(), Bytes(source.size()));
  }

  // The part [begin, begin + bytes) of this range. Its errors describe the whole transfer: `got`
  // counts from the transfer's first byte.
  PendingRange piece(Bytes begin, Bytes bytes) const {
    STRATA_ASSERT(begin.value >= 0 && bytes.value >= 0 && begin + bytes <= wanted());
    PendingRange part = *this;
    part.begin_ = begin_ + begin;
    part.next_ = part.begin_;
    part.end_ = part.begin_ + bytes;
    return part;
  }

  Bytes wanted() const { return end_ - begin_; }
  bool complete() const { return next_ == end_; }
  // The bytes before the first block of the file, if there is a descriptor for direct transfers.
  Bytes to_direct_block() const {
    const Bytes past_block = (offset_ + next_) % File::kDirectBlock;
    return direct_ && past_block > Bytes() ? File::kDirectBlock - past_block : Bytes();
  }
  // The next call of an incomplete transfer.
  struct Call {
    int fd;
    Bytes offset;  // in the file
    std::size_t bytes;
    bool direct;
  };
  Call next_call() const {
    const Bytes at = offset_ + next_;
    const Bytes rest = end_ - next_;
    const Call buffered{file_->fd(), at, rest.size(), false};
    if (!direct_) return buffered;
    const Bytes past_block = at % File::kDirectBlock;
    const std::byte* const memory = reading() ? target() : source();
    const Bytes address(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory)));
    if (address % File::kDirectBlock != past_block) return buffered;  // the blocks never align
    if (past_block > Bytes())
      return {file_->fd(), at, std::min(rest, File::kDirectBlock - past_block).size(), false};
    const Bytes whole = rest - rest % File::kDirectBlock;
    if (whole == Bytes()) return buffered;
    return {file_->direct_fd(), at, whole.size(), true};
  }
  bool reading() const { return source_ == nullptr; }
  // The target of a read's next call, or the source of a write's; the other one is null.
  std::byte* target() const { return reading() ? target_ + next_.value : nullptr; }
  const std::byte* source() const { return reading() ? nullptr : source_ + next_.value; }
  // Whether the last call returned EAGAIN: the next one should be allowed to wait.
  bool told_to_wait() const { return waits_ > 0; }
  // Takes the result of that call (bytes moved, or -errno). Throws IoError.
  void accept(const Call& call, std::int64_t result) {
    if (result == -EINTR) return;
    if (result == -EAGAIN && ++waits_ <= kWaitsMax) return;
    // Not this file, not these sizes, or perhaps an end of the file that lies within a block: what
    // the page cache says of the same bytes counts.
    if (call.direct && (result == -EINVAL || result == -EOPNOTSUPP || result == 0)) {
      direct_ = false;
      return;
    }
    if (result < 0) fail(reading() ? "read failed" : "write failed", static_cast<int>(-result));
    if (result == 0 && reading())
      fail("the file ends before the range to read does; it is truncated, or is not the file meant",
           0);
    if (result == 0) fail("write failed: the system takes no more bytes and gives no reason", 0);
    STRATA_ASSERT(Bytes(result).size() <= call.bytes);
    next_ += Bytes(result);
    waits_ = 0;
  }
  // Makes calls until the range is complete.
  void run(SystemCalls& calls) {
    while (!complete()) {
      const Call call = next_call();
      if (reading()) {
        accept(call, calls.read_at(call.fd, {target(), call.bytes}, call.offset));
      } else {
        accept(call, calls.write_at(call.fd, {source(), call.bytes}, call.offset));
      }
    }
  }

 private:
  static constexpr int kWaitsMax = 100;

  PendingRange(const File& file, Bytes offset, std::byte* target, const std::byte* source,
               Bytes bytes)
      : file_(&file),
        target_(target),
        source_(source),
        offset_(offset),
        bytes_(bytes),
        end_(bytes),
        direct_(file.direct_fd() >= 0) {
    const std::int64_t room = std::numeric_limits<std::int64_t>::max() - bytes.value;
    if (bytes.value < 0 || offset.value < 0 || offset.value > room)
      throw UsageError("no file has the range asked for: path={} offset={} bytes={}", file.path(),
                       offset.value, bytes.value);
  }
  [[noreturn]] void fail(const char* what, int code) const {
    throw IoError("{}: path={} offset={} wanted={} got={}{}{}", what, file_->path(), offset_.value,
                  bytes_.value, next_.value, code != 0 ? " " : "",
                  code != 0 ? errno_text(code) : "");
  }

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
inline void read_fully(const File& file, Bytes offset, std::span<std::byte> target) {
  SystemCalls calls;
  PendingRange::reading(file, offset, target).run(calls);
}
inline void write_fully(const File& file, Bytes offset, std::span<const std::byte> source) {
  SystemCalls calls;
  PendingRange::writing(file, offset, source).run(calls);
}

// One transfer of an engine, cut into pieces that are served in any order. It knows which pieces
// were handed out, which have ended, and the first failure. When several pieces fail, the failure
// at the lowest offset counts; after a failure no more pieces are handed out. Pieces of a file with
// a descriptor for direct transfers end at blocks of the file, so that only the two ends of the
// transfer can lie across one. Threads: internally synchronised. Ownership: shared by the Transfer,
// the engine's queue and the threads that serve a piece; borrows the File and the memory.
class TransferJob {
 public:
  struct Piece {
    std::int64_t index;
    PendingRange range;
    bool is_last;  // no other is handed out after it
  };

  // `piece`: bytes of a piece; the first one may have a block more.
  TransferJob(const PendingRange& range, Bytes piece)
      : range_(range),
        piece_(piece),
        first_extra_(range.to_direct_block()),
        pieces_(pieces_of(range.wanted(), piece, first_extra_)) {}

  // The next piece to serve; nullopt when all are handed out, or when one has failed.
  std::optional<Piece> claim() {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr || claimed_ == pieces_) return std::nullopt;
    const std::int64_t index = claimed_++;
    if (index == 0) times_.begin = std::chrono::steady_clock::now();
    const Bytes begin = index == 0 ? Bytes() : piece_ * index + first_extra_;
    const Bytes end = claimed_ == pieces_ ? range_.wanted() : piece_ * claimed_ + first_extra_;
    return Piece{index, range_.piece(begin, end - begin), claimed_ == pieces_};
  }
  // Ends a claimed piece; `error` is null if it is complete.
  // Pieces are claimed in order, so all those below a failed one have been claimed and will be
  // settled: the error at the lowest offset always wins.
  void settle(std::int64_t index, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ++settled_;
    if (error != nullptr && (error_ == nullptr || index < error_index_)) {
      error_ = std::move(error);
      error_index_ = index;
    }
    if (!finished()) return;
    times_.end = std::chrono::steady_clock::now();
    finished_.notify_all();
  }

  bool done() {
    const std::lock_guard lock(mutex_);
    return finished();
  }
  // Blocks until no thread serves a piece. Throws the failure.
  void wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished(); });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  void wait_quietly() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished(); });
  }
  // The times of the first claim and of the last piece's end; nullopt if it is not done, or had no
  // bytes.
  std::optional<TransferTimes> times() const {
    const std::lock_guard lock(mutex_);
    if (!finished() || pieces_ == 0) return std::nullopt;
    return times_;
  }

 private:
  static std::int64_t pieces_of(Bytes wanted, Bytes piece, Bytes first_extra) {
    if (wanted == Bytes()) return 0;
    const std::int64_t rest = (wanted - first_extra).value;
    return std::max<std::int64_t>(1, (rest + piece.value - 1) / piece.value);
  }
  bool finished() const {
    return settled_ == claimed_ && (error_ != nullptr || claimed_ == pieces_);
  }

  const PendingRange range_;
  const Bytes piece_;
  const Bytes first_extra_;  // what the first piece has beyond piece_
  const std::int64_t pieces_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::int64_t claimed_ = 0;
  std::int64_t settled_ = 0;
  std::int64_t error_index_ = 0;
  std::exception_ptr error_;
  TransferTimes times_;
};

class JobTransfer final : public Transfer {
 public:
  explicit JobTransfer(std::shared_ptr<TransferJob> job) : job_(std::move(job)) {}
  ~JobTransfer() override { job_->wait_quietly(); }
  bool done() override { return job_->done(); }
  void wait() override { job_->wait(); }
  std::optional<TransferTimes> times() const override { return job_->times(); }

 private:
  std::shared_ptr<TransferJob> job_;
};

// An engine that serves each transfer as a job of pieces.
class JobEngine : public IoEngine {
 public:
  std::unique_ptr<Transfer> read(const File& file, Bytes offset,
                                 std::span<std::byte> target) final {
    return start(PendingRange::reading(file, offset, target));
  }
  std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                  std::span<const std::byte> source) final {
    return start(PendingRange::writing(file, offset, source));
  }

 protected:
  // `piece`: bytes of a piece.
  explicit JobEngine(Bytes piece) : piece_(piece) {}

 private:
  // The job has bytes. Blocks while the engine's queue is full.
  virtual void enqueue(const std::shared_ptr<TransferJob>& job) = 0;
  std::unique_ptr<Transfer> start(const PendingRange& range) {
    auto job = std::make_shared<TransferJob>(range, piece_);
    if (!range.complete()) enqueue(job);
    return std::make_unique<JobTransfer>(std::move(job));
  }

  const Bytes piece_;
};

}  // namespace strata::io
