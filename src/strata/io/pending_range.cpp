#include "strata/io/pending_range.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>

#include "strata/base/error.h"

namespace strata::io {
namespace {

constexpr int kWaitsMax = 100;

}  // namespace

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

Bytes PendingRange::to_direct_block() const {
  const Bytes past_block = (offset_ + next_) % File::kDirectBlock;
  return direct_ && past_block > Bytes() ? File::kDirectBlock - past_block : Bytes();
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
