#include "strata/offload/swap_folder.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

using Medium = SwapFolder::Medium;

constexpr std::string_view kPrefix = "strata-swap.";
constexpr std::string_view kLockName = "lock";
constexpr int kAttempts = 100;

struct FileSystem {
  std::uint32_t type;
  std::string_view name;
  Medium medium;
};

// The magic numbers of statfs(2).
constexpr std::array kFileSystems = {
    FileSystem{0x01021994, "tmpfs", Medium::kMemory},
    FileSystem{0x858458F6, "ramfs", Medium::kMemory},
    FileSystem{0x00006969, "nfs", Medium::kNetwork},
    FileSystem{0x0000517B, "smb", Medium::kNetwork},
    FileSystem{0xFE534D42, "smb", Medium::kNetwork},
    FileSystem{0xFF534D42, "cifs", Medium::kNetwork},
    FileSystem{0x00C36400, "ceph", Medium::kNetwork},
    FileSystem{0x0BD00BD0, "lustre", Medium::kNetwork},
    FileSystem{0x47504653, "gpfs", Medium::kNetwork},
    FileSystem{0x19830326, "beegfs", Medium::kNetwork},
    FileSystem{0x01021997, "9p", Medium::kNetwork},
    FileSystem{0x65735546, "fuse", Medium::kNetwork},
    FileSystem{0xEF53, "ext4", Medium::kDrive},
    FileSystem{0x58465342, "xfs", Medium::kDrive},
    FileSystem{0x9123683E, "btrfs", Medium::kDrive},
};

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string below(const std::string& folder, std::string_view name) {
  return fmt::format("{}{}{}", folder, folder.ends_with('/') ? "" : "/", name);
}

// That `path` is a folder; else an IoError that says what it is.
void require_folder(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const int code = errno;
    throw IoError(fmt::format(
        "the folder for states on a drive cannot be used: path={} {}; make it, or mount the drive",
        path, errno_text(code)));
  }
  if (!S_ISDIR(status.st_mode)) {
    throw IoError(fmt::format(
        "the folder for states on a drive is not a folder; give the path of one: path={}", path));
  }
}

// The owner of a folder's lock writes this into it, so that a later job knows the leftovers of its
// own host.
std::string owner_text() {
  return fmt::format("{}\n", host_name());
}

bool is_of_this_host(int lock) {
  std::array<char, 256> text{};
  const ssize_t count = ::pread(lock, text.data(), text.size() - 1, 0);
  return count > 0 &&
         std::string_view(text.data(), static_cast<std::size_t>(count)) == owner_text();
}

// Whether an open file has been removed.
bool is_removed(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) != 0 || status.st_nlink == 0;
}

}  // namespace

SwapFolder::SwapFolder(const std::string& path, int rank) : owner_(::getpid()) {
  require_folder(path);
  std::error_code failed;
  root_ = std::filesystem::absolute(path, failed).string();
  if (failed) root_ = path;
  struct statfs status {};
  if (::statfs(root_.c_str(), &status) == 0) {
    for (const FileSystem& known : kFileSystems) {
      if (known.type != static_cast<std::uint32_t>(status.f_type)) continue;
      medium_ = known.medium;
      file_system_ = known.name;
    }
  }
  remove_leftovers();
  // Another rank that looks for leftovers may take a folder for one until it is locked.
  for (int attempt = 0; !make(rank); ++attempt) {
    if (attempt < kAttempts) continue;
    throw IoError(fmt::format(
        "cannot make a folder for states on a drive: something removes it at once: path={}",
        root_));
  }
}

SwapFolder::~SwapFolder() {
  if (folder_.empty() || owner_ != ::getpid()) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

bool SwapFolder::make(int rank) {
  std::string folder = below(root_, fmt::format("{}rank{}.XXXXXX", kPrefix, rank));
  if (::mkdtemp(folder.data()) == nullptr) {
    const int code = errno;
    throw IoError(
        fmt::format("cannot make a folder for states on a drive; choose a path that this user may "
                    "write to: path={} {}",
                    root_, errno_text(code)));
  }
  const std::string lock_path = below(folder, kLockName);
  FileDescriptor file(
      ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) {
    const int code = errno;
    ::rmdir(folder.c_str());
    if (code == ENOENT) return false;
    throw IoError(fmt::format("cannot make a file for states on a drive: path={} {}", lock_path,
                              errno_text(code)));
  }
  lock_ = io::FileLock(std::move(file));
  const io::FileLock::Outcome outcome = lock_.take();
  if (outcome == io::FileLock::Outcome::kHeldElsewhere) return false;
  // Without locks no other process can lock it either, and so none takes it for a leftover.
  locks_ = outcome == io::FileLock::Outcome::kTaken;
  if (is_removed(lock_.file().get())) return false;
  const std::string owner = owner_text();
  // Without it the folder is cleaned up like others, but on network file systems.
  [[maybe_unused]] const ssize_t count =
      ::pwrite(lock_.file().get(), owner.data(), owner.size(), 0);
  folder_ = std::move(folder);
  return true;
}

void SwapFolder::remove_leftovers() {
  std::error_code failed;
  std::filesystem::directory_iterator entries(root_, failed);
  while (!failed && entries != std::filesystem::directory_iterator()) {
    const std::string name = entries->path().filename().string();
    if (name.starts_with(kPrefix) && remove_leftover(below(root_, name))) ++removed_;
    entries.increment(failed);
  }
}

bool SwapFolder::remove_leftover(const std::string& folder) const {
  const FileDescriptor opened(
      ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!opened.valid() || ::fstat(opened.get(), &status) != 0 || status.st_uid != ::geteuid())
    return false;
  FileDescriptor file(
      ::openat(opened.get(), std::string(kLockName).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  // Its owner died before it had a lock; or lives, and makes another one when this is gone.
  if (!file.valid()) return errno == ENOENT && ::rmdir(folder.c_str()) == 0;
  io::FileLock lock(std::move(file));
  if (lock.take() != io::FileLock::Outcome::kTaken) return false;
  if (medium_ == Medium::kNetwork && !is_of_this_host(lock.file().get())) return false;
  std::error_code failed;
  std::filesystem::remove_all(folder, failed);
  return !failed;
}

std::string SwapFolder::remark() const {
  std::string text;
  if (medium_ == Medium::kMemory) {
    text = fmt::format(
        "states that are to lie on a drive lie in memory: {} is on {}, which takes the memory that "
        "this is meant to save",
        root_, file_system_);
  } else if (medium_ == Medium::kNetwork) {
    text = fmt::format(
        "states that are to lie on a drive lie on a network file system: {} is on {}; every step "
        "reads and writes all of them over the network, and a local drive is faster",
        root_, file_system_);
  }
  if (locks_) return text;
  return fmt::format(
      "{}{}{} has no locks, so the folders of killed jobs stay until you remove them", text,
      text.empty() ? "" : "; ", root_);
}

}  // namespace strata::offload
