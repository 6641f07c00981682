#include "strata/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/errno_text.h"

namespace strata::io {
namespace {

int flags_of(File::Mode mode) {
  switch (mode) {
    case File::Mode::kRead:
      return O_RDONLY;
    case File::Mode::kCreate:
      return O_RDWR | O_CREAT | O_TRUNC;
    case File::Mode::kReadWrite:
      return O_RDWR;
  }
  STRATA_ASSERT(false);
}

const char* verb_of(File::Mode mode) {
  return mode == File::Mode::kCreate ? "create" : "open";
}

}  // namespace

File::File(std::string path, Mode mode) : path_(std::move(path)) {
  // O_NONBLOCK changes nothing for a regular file; without it a pipe would hold us here for ever.
  const int flags = flags_of(mode) | O_CLOEXEC | O_NONBLOCK;
  do {
    fd_ = ::open(path_.c_str(), flags, 0666);
  } while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) {
    const int code = errno;
    throw IoError(
        fmt::format("cannot {} a file: path={} {}", verb_of(mode), path_, errno_text(code)));
  }
  struct stat status {};
  const bool known = ::fstat(fd_, &status) == 0;
  if (!known || !(S_ISREG(status.st_mode) || S_ISBLK(status.st_mode))) {
    ::close(fd_);
    fd_ = -1;
    throw IoError(fmt::format(
        "cannot {} a file: it is {}; give the path of a regular file: path={}", verb_of(mode),
        known && S_ISDIR(status.st_mode) ? "a directory" : "not a regular file", path_));
  }
  // It has done its work, and asynchronous engines would take it as a wish for EAGAIN.
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) & ~O_NONBLOCK);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Bytes File::size() const {
  // lseek and not fstat, which calls every block device empty. Nobody uses the descriptor's
  // position.
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  if (end < 0) {
    const int code = errno;
    throw IoError(fmt::format("cannot tell a file's size: path={} {}", path_, errno_text(code)));
  }
  return Bytes(static_cast<std::int64_t>(end));
}

void File::reserve(Bytes bytes) {
  if (bytes.value <= 0) return;
  int code = 0;
  do {
    code = ::posix_fallocate(fd_, 0, bytes.value);
  } while (code == EINTR);
  if (code != 0) {
    throw IoError(fmt::format(
        "cannot reserve space for a file; free space on its file system or choose another: path={} "
        "wanted={} ({}) {}",
        path_, bytes.value, to_string(bytes), errno_text(code)));
  }
}

void File::sync() {
  int result = 0;
  do {
    result = ::fsync(fd_);
  } while (result < 0 && errno == EINTR);
  if (result < 0) {
    const int code = errno;
    throw IoError(fmt::format("cannot bring a file to disk: path={} {}", path_, errno_text(code)));
  }
}

}  // namespace strata::io
