#include "strata/io/file_lock.h"

#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace strata::io {

FileLock::FileLock(FileLock&& other) noexcept
    : file_(std::move(other.file_)), owner_(std::exchange(other.owner_, 0)) {}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(owner_, other.owner_);
  return *this;
}

FileLock::Outcome FileLock::take() {
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
    owner_ = ::getpid();
    return Outcome::kTaken;
  }
  if (errno == EWOULDBLOCK) return Outcome::kHeldElsewhere;
  const bool none = errno == ENOLCK || errno == ENOTSUP || errno == EINVAL;
  return none ? Outcome::kNoLocks : Outcome::kFailed;
}

void FileLock::release() noexcept {
  if (owner_ != 0 && owner_ == ::getpid()) ::flock(file_.get(), LOCK_UN);
  owner_ = 0;
}

}  // namespace strata::io
