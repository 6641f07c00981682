#include "strata/io/pending_range.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "strata/base/error.h"

namespace strata::io {
namespace {

constexpr int kWaitsMax = 100;

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

std::int64_t pieces_of(Bytes wanted, Bytes piece, Bytes first_extra) {
  if (wanted == Bytes()) return 0;
  const std::int64_t rest = (wanted - first_extra).value;
  return std::max<std::int64_t>(1, (rest + piece.value - 1) / piece.value);
}

}  // namespace

std::int64_t SystemCalls::read_at(int fd, std::span<std::byte> target, Bytes offset) {
  const ssize_t moved = ::pread(fd, target.data(), target.size(), offset.value);
  return moved >= 0 ? moved : -errno;
}

std::int64_t SystemCalls::write_at(int fd, std::span<const std::byte> source, Bytes offset) {
  const ssize_t moved = ::pwrite(fd, source.data(), source.size(), offset.value);
  return moved >= 0 ? moved : -errno;
}

PendingRange::PendingRange(const File& file, Bytes offset, std::byte* target,
                           const std::byte* source, Bytes bytes)
    : file_(&file),
      target_(target),
      source_(source),
      offset_(offset),
      bytes_(bytes),
      end_(bytes),
      direct_(file.direct_fd() >= 0) {
  const std::int64_t room = std::numeric_limits<std::int64_t>::max() - bytes.value;
  if (bytes.value < 0 || offset.value < 0 || offset.value > room) {
    throw UsageError("no file has the range asked for: path={} offset={} bytes={}", file.path(),
                     offset.value, bytes.value);
  }
}

PendingRange::Call PendingRange::next_call() const {
  const Bytes at = offset_ + next_;
  const Bytes rest = end_ - next_;
  const Call buffered{file_->fd(), at, rest.size(), false};
  if (!direct_) return buffered;
  const Bytes past_block = at % File::kDirectBlock;
  const std::byte* const memory = reading() ? target() : source();
  const Bytes address(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory)));
  if (address % File::kDirectBlock != past_block) return buffered;  // the blocks never align
  if (past_block > Bytes()) {
    return {file_->fd(), at, std::min(rest, File::kDirectBlock - past_block).size(), false};
  }
  const Bytes whole = rest - rest % File::kDirectBlock;
  if (whole == Bytes()) return buffered;
  return {file_->direct_fd(), at, whole.size(), true};
}

void PendingRange::accept(const Call& call, std::int64_t result) {
  if (result == -EINTR) return;
  if (result == -EAGAIN && ++waits_ <= kWaitsMax) return;
  // Not this file, not these sizes, or perhaps an end of the file that lies within a block: what
  // the page cache says of the same bytes counts.
  if (call.direct && (result == -EINVAL || result == -EOPNOTSUPP || result == 0)) {
    direct_ = false;
    return;
  }
  if (result < 0) {
    fail(reading() ? "read failed" : "write failed", static_cast<int>(-result));
  }
  if (result == 0 && reading()) {
    fail("the file ends before the range to read does; it is truncated, or is not the file meant",
         0);
  }
  if (result == 0) fail("write failed: the system takes no more bytes and gives no reason", 0);
  STRATA_ASSERT(Bytes(result).size() <= call.bytes);
  next_ += Bytes(result);
  waits_ = 0;
}

void PendingRange::run(SystemCalls& calls) {
  while (!complete()) {
    const Call call = next_call();
    if (reading()) {
      accept(call, calls.read_at(call.fd, {target(), call.bytes}, call.offset));
    } else {
      accept(call, calls.write_at(call.fd, {source(), call.bytes}, call.offset));
    }
  }
}

void PendingRange::fail(const char* what, int code) const {
  throw IoError("{}: path={} offset={} wanted={} got={}{}{}", what, file_->path(), offset_.value,
                bytes_.value, next_.value, code != 0 ? " " : "", code != 0 ? errno_text(code) : "");
}

void read_fully(const File& file, Bytes offset, std::span<std::byte> target) {
  SystemCalls calls;
  PendingRange::reading(file, offset, target).run(calls);
}

void write_fully(const File& file, Bytes offset, std::span<const std::byte> source) {
  SystemCalls calls;
  PendingRange::writing(file, offset, source).run(calls);
}

TransferJob::TransferJob(const PendingRange& range, Bytes piece)
    : range_(range),
      piece_(piece),
      first_extra_(range.to_direct_block()),
      pieces_(pieces_of(range.wanted(), piece, first_extra_)) {}

std::unique_ptr<Transfer> JobEngine::start(const PendingRange& range) {
  auto job = std::make_shared<TransferJob>(range, piece_);
  if (!range.complete()) enqueue(job);
  return std::make_unique<JobTransfer>(std::move(job));
}

}  // namespace strata::io
