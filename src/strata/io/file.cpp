#include "strata/io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "strata/base/error.h"

namespace strata::io {
namespace {

int flags_of(File::Mode mode) {
  switch (mode) {
    case File::Mode::kRead:
      return O_RDONLY;
    case File::Mode::kCreate:
      return O_RDWR | O_CREAT | O_TRUNC;
    case File::Mode::kCreateNew:
      return O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW;
    case File::Mode::kReadWrite:
      return O_RDWR;
  }
  STRATA_ASSERT(false);
}

bool creates(File::Mode mode) {
  return mode == File::Mode::kCreate || mode == File::Mode::kCreateNew;
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

// Invalid where it fails; errno says why.
FileDescriptor open_fully(const std::string& path, int flags, mode_t permissions) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, permissions);
  } while (fd < 0 && errno == EINTR);
  return FileDescriptor(fd);
}

// A second way into an open file; invalid where there is none. Through /proc it is the same file
// even where another has taken its name.
FileDescriptor open_direct(int fd) {
  if (refuses_direct(fd)) return {};
  const int access = ::fcntl(fd, F_GETFL) & O_ACCMODE;
  return open_fully(fmt::format("/proc/self/fd/{}", fd), access | O_DIRECT, 0);
}

constexpr std::size_t kEvictable = 64;  // for other code that opens files meanwhile

std::size_t open_descriptors() {
  std::size_t count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error))
    ++count;
  return count;
}

// cachestat(2), Linux 6.5 and newer, has no wrapper in most C libraries. The number and the
// structures are the same everywhere.
constexpr long kCachestat = 451;

struct CacheRange {
  std::uint64_t offset;
  std::uint64_t bytes;
};

struct CacheCounts {
  std::uint64_t cached;
  std::uint64_t dirty;
  std::uint64_t writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

}  // namespace

File::File(std::string path, Mode mode) : path_(std::move(path)) {
  // O_NONBLOCK changes nothing for a regular file; without it a pipe would hold us here for ever.
  descriptor_ =
      open_fully(path_, flags_of(mode) | O_NONBLOCK, mode == Mode::kCreateNew ? 0600 : 0666);
  if (!descriptor_.valid())
    throw_errno(creates(mode) ? "cannot create a file" : "cannot open a file", path_);
  struct stat status {};
  const bool known = ::fstat(fd(), &status) == 0;
  if (!known || !(S_ISREG(status.st_mode) || S_ISBLK(status.st_mode)))
    throw IoError("cannot {} a file: it is {}; give the path of a regular file: path={}",
                  creates(mode) ? "create" : "open",
                  known && S_ISDIR(status.st_mode) ? "a directory" : "not a regular file", path_);
  // It has done its work, and asynchronous engines would take it as a wish for EAGAIN.
  ::fcntl(fd(), F_SETFL, ::fcntl(fd(), F_GETFL) & ~O_NONBLOCK);
}

File::File(std::string path, FileDescriptor descriptor, FileDescriptor direct)
    : path_(std::move(path)), descriptor_(std::move(descriptor)), direct_(std::move(direct)) {}

File File::in_memory(std::span<const std::byte> content) {
  File file("(memory)", FileDescriptor(::memfd_create("strata", MFD_CLOEXEC)), {});
  std::size_t done = 0;
  while (file.descriptor_.valid() && done < content.size()) {
    const ssize_t count = ::write(file.fd(), content.data() + done, content.size() - done);
    if (count < 0 && errno != EINTR) break;
    done += count < 0 ? 0 : static_cast<std::size_t>(count);
  }
  if (!file.descriptor_.valid() || done < content.size())
    throw IoError("cannot make a file in memory: bytes={} {}", content.size(), errno_text(errno));
  return file;
}

File File::direct() const {
  FileDescriptor again(::fcntl(fd(), F_DUPFD_CLOEXEC, 0));
  if (!again.valid()) throw_errno("cannot open a file again", path_);
  return File(path_, std::move(again), open_direct(fd()));
}

Bytes File::size() const {
  // lseek and not fstat, which calls every block device empty. No code uses the descriptor's
  // position.
  const off_t end = ::lseek(fd(), 0, SEEK_END);
  if (end < 0) throw_errno("cannot tell a file's size", path_);
  return Bytes(static_cast<std::int64_t>(end));
}

void File::reserve(Bytes bytes) {
  if (bytes.value <= 0) return;
  int code = 0;
  do {
    code = ::posix_fallocate(fd(), 0, bytes.value);
  } while (code == EINTR);
  if (code != 0)
    throw IoError(
        "cannot reserve space for a file; free space on its file system or choose another: path={} "
        "wanted={} ({}) {}",
        path_, bytes.value, to_string(bytes), errno_text(code));
}

void File::sync() {
  int result = 0;
  do {
    result = ::fsync(fd());
  } while (result < 0 && errno == EINTR);
  if (result < 0) throw_errno("cannot bring a file to disk", path_);
}

void throw_errno(std::string_view what, std::string_view path) {
  const int code = errno;
  throw IoError("{}: path={} {}", what, path, errno_text(code));
}

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

void allow_descriptors(std::size_t more) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted =
      std::min(limit.rlim_max, static_cast<rlim_t>(open_descriptors() + more + kEvictable));
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::optional<bool> in_page_cache(const File& file, Bytes offset) {
  // First the one that only looks.
  CacheRange range{static_cast<std::uint64_t>(offset.value), 1};
  CacheCounts counts{};
  if (::syscall(kCachestat, file.fd(), &range, &counts, 0U) == 0) return counts.cached > 0;
  // Reads nothing that is not there, but may begin to fetch it.
  std::byte byte{};
  const iovec target{&byte, 1};
  const ssize_t got = ::preadv2(file.fd(), &target, 1, offset.value, RWF_NOWAIT);
  if (got > 0) return true;
  if (got < 0 && errno == EAGAIN) return false;
  return std::nullopt;
}

}  // namespace strata::io
