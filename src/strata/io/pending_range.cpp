#include "strata/io/pending_range.h"

#include <cerrno>
#include <limits>

#include "strata/base/error.h"
#include "strata/io/errno_text.h"

namespace strata::io {

PendingRange::PendingRange(const File& file, Bytes offset, std::byte* target,
                           const std::byte* source, Bytes bytes)
    : file_(&file), target_(target), source_(source), offset_(offset), bytes_(bytes), end_(bytes) {
  const std::int64_t room = std::numeric_limits<std::int64_t>::max() - bytes.value;
  if (bytes.value < 0 || offset.value < 0 || offset.value > room) {
    throw UsageError(fmt::format("no file has the range asked for: path={} offset={} bytes={}",
                                 file.path(), offset.value, bytes.value));
  }
}

PendingRange PendingRange::reading(const File& file, Bytes offset, std::span<std::byte> target) {
  return PendingRange(file, offset, target.data(), nullptr, Bytes(target.size()));
}

PendingRange PendingRange::writing(const File& file, Bytes offset,
                                   std::span<const std::byte> source) {
  return PendingRange(file, offset, nullptr, source.data(), Bytes(source.size()));
}

PendingRange PendingRange::piece(Bytes begin, Bytes bytes) const {
  STRATA_ASSERT(begin.value >= 0 && bytes.value >= 0 && begin + bytes <= wanted());
  PendingRange part = *this;
  part.begin_ = begin_ + begin;
  part.next_ = part.begin_;
  part.end_ = part.begin_ + bytes;
  return part;
}

void PendingRange::accept(std::int64_t result) {
  if (result == -EINTR) return;
  const bool reading = source_ == nullptr;
  if (result < 0) {
    fail(reading ? "read failed" : "write failed", static_cast<int>(-result));
  }
  if (result == 0 && reading) {
    fail("the file ends before the range to read does; it is truncated, or is not the file meant",
         0);
  }
  if (result == 0) fail("write failed: the system takes no more bytes and gives no reason", 0);
  STRATA_ASSERT(result <= (end_ - next_).value);
  next_ += Bytes(result);
}

void PendingRange::run(SystemCalls& calls) {
  while (!complete()) {
    const Bytes at = offset_ + next_;
    const std::size_t rest = (end_ - next_).size();
    if (source_ == nullptr) {
      accept(calls.read_at(file_->fd(), {target_ + next_.value, rest}, at));
    } else {
      accept(calls.write_at(file_->fd(), {source_ + next_.value, rest}, at));
    }
  }
}

void PendingRange::fail(const char* what, int code) const {
  throw IoError(fmt::format("{}: path={} offset={} wanted={} got={}{}{}", what, file_->path(),
                            offset_.value, bytes_.value, next_.value, code != 0 ? " " : "",
                            code != 0 ? errno_text(code) : ""));
}

void read_fully(const File& file, Bytes offset, std::span<std::byte> target) {
  KernelCalls calls;
  PendingRange::reading(file, offset, target).run(calls);
}

void write_fully(const File& file, Bytes offset, std::span<const std::byte> source) {
  KernelCalls calls;
  PendingRange::writing(file, offset, source).run(calls);
}

}  // namespace strata::io
