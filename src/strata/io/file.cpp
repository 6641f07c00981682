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

// Whether the file system says itself that kDirectBlock will not do. Most say nothing.
bool refuses_direct([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return false;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return false;
  const auto fits = [](std::uint32_t unit) {
    return unit != 0 && File::kDirectBlock.value % static_cast<std::int64_t>(unit) == 0;
  };
  return !fits(status.stx_dio_offset_align) || !fits(status.stx_dio_mem_align);
#else
  return false;
#endif
}

// A second way into an open file, or -1. Through /proc it is the same file even where another has
// taken its name.
int open_direct(int fd) {
  if (refuses_direct(fd)) return -1;
  const std::string itself = fmt::format("/proc/self/fd/{}", fd);
  int direct = -1;
  do {
    direct = ::open(itself.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  } while (direct < 0 && errno == EINTR);
  return direct;
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

File::File(std::string path, int fd, int direct_fd)
    : path_(std::move(path)), fd_(fd), direct_fd_(direct_fd) {}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      direct_fd_(std::exchange(other.direct_fd_, -1)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    direct_fd_ = std::exchange(other.direct_fd_, -1);
  }
  return *this;
}

File::~File() {
  close();
}

void File::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  if (direct_fd_ >= 0) ::close(direct_fd_);
}

File File::direct() const {
  const int again = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (again < 0) {
    const int code = errno;
    throw IoError(fmt::format("cannot open a file again: path={} {}", path_, errno_text(code)));
  }
  return File(path_, again, open_direct(fd_));
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
