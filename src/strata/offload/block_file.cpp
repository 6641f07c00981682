#include "strata/offload/block_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/io/folder_calls.h"
#include "strata/io/striping.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

using Medium = FileSystem::Medium;

constexpr std::string_view kPrefix = "strata-swap.";
constexpr std::string_view kLockName = "lock";
constexpr int kAttempts = 100;

struct KnownFileSystem {
  std::uint32_t magic;
  const char* name;
  Medium medium;
};

constexpr std::array kFileSystems{
    KnownFileSystem{EXT4_SUPER_MAGIC, "ext4", Medium::kDrive},
    KnownFileSystem{XFS_SUPER_MAGIC, "xfs", Medium::kDrive},
    KnownFileSystem{BTRFS_SUPER_MAGIC, "btrfs", Medium::kDrive},
    KnownFileSystem{F2FS_SUPER_MAGIC, "f2fs", Medium::kDrive},
    KnownFileSystem{OVERLAYFS_SUPER_MAGIC, "overlay", Medium::kDrive},
    KnownFileSystem{0x2FC12FC1, "zfs", Medium::kDrive},
    KnownFileSystem{TMPFS_MAGIC, "tmpfs", Medium::kMemory},
    KnownFileSystem{RAMFS_MAGIC, "ramfs", Medium::kMemory},
    KnownFileSystem{NFS_SUPER_MAGIC, "nfs", Medium::kNetwork},
    KnownFileSystem{SMB_SUPER_MAGIC, "smb", Medium::kNetwork},
    KnownFileSystem{SMB2_SUPER_MAGIC, "smb", Medium::kNetwork},
    KnownFileSystem{CIFS_SUPER_MAGIC, "cifs", Medium::kNetwork},
    KnownFileSystem{CEPH_SUPER_MAGIC, "ceph", Medium::kNetwork},
    KnownFileSystem{V9FS_MAGIC, "9p", Medium::kNetwork},
    KnownFileSystem{FUSE_SUPER_MAGIC, "fuse", Medium::kNetwork},
    KnownFileSystem{0x0BD00BD0, "lustre", Medium::kNetwork},
    KnownFileSystem{0x47504653, "gpfs", Medium::kNetwork},
    KnownFileSystem{0x19830326, "beegfs", Medium::kNetwork},
};

std::string below(const std::string& folder, std::string_view name) {
  return fmt::format("{}{}{}", folder, folder.ends_with('/') ? "" : "/", name);
}

// That `path` is a folder; else an IoError that says what it is.
void require_folder(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw IoError(
        "the folder for states on a drive cannot be used: path={} {}; make it, or mount the drive",
        path, errno_text(errno));
  if (!S_ISDIR(status.st_mode))
    throw IoError("the folder for states on a drive is not a folder; give the path of one: path={}",
                  path);
}

// The owner of a folder's lock writes this into it, so that a later job knows the leftovers of its
// own host.
std::string owner_text() {
  std::array<char, 256> host{};
  return fmt::format("{}\n", ::gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "");
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

// One file on a drive that takes its space before it is used.
class DriveFile {
 public:
  // Makes the file, which only its owner may read.
  explicit DriveFile(std::unique_ptr<SwapFolder> folder)
      : folder_(std::move(folder)),
        file_(io::File(below(folder_->path(), "states"), io::File::Mode::kCreateNew).direct()) {}

  const io::File& file() const { return file_; }
  Bytes size() const { return size_; }

  // Takes space until the file has `size` bytes in all. When it throws, the file has the same space
  // as before.
  void grow(Bytes size) {
    const Bytes more = size - size_;
    if (more.value <= 0) return;
    // This asks first: a file that fills the drive would take space that other programs need soon.
    if (const Bytes free = free_bytes(); free < more) refuse(more, free, ENOSPC);
    int code = 0;
    do {
      code = ::posix_fallocate(file_.fd(), size_.value, more.value);
    } while (code == EINTR);
    if (code != 0) {
      shrink(size_);  // what was taken of it
      refuse(more, free_bytes(), code);
    }
    size_ = size;
  }
  void count_written(Bytes bytes) { written_ += bytes; }
  // Counted for the folder that users named: the parent of the rank's own folder.
  DriveWrites drive_writes() const {
    return {std::filesystem::path(folder_->path()).parent_path().string(), written_};
  }
  // Gives back the space beyond; no transfer is under way there.
  void shrink(Bytes size) noexcept {
    [[maybe_unused]] const int result = ::ftruncate(file_.fd(), size.value);
    size_ = std::min(size_, size);
  }

 private:
  Bytes free_bytes() const { return io::FolderCalls().free_space(file_.path()).value_or(Bytes()); }
  [[noreturn]] void refuse(Bytes more, Bytes free, int code) const {
    throw OutOfMemoryError(
        "there is too little space for states on the drive: {} wanted beside {} taken, {} free; "
        "free some, choose another drive or shard over more ranks: path={} wanted={} free={} {}",
        to_string(more), to_string(size_), to_string(free), file_.path(), more.value, free.value,
        errno_text(code));
  }

  std::unique_ptr<SwapFolder> folder_;
  io::File file_;
  Bytes size_;
  Bytes written_;
};

// The bytes a second at which a drive reads and writes in turns, measured with some megabytes that
// the file has for a moment.
double measure_speed(DriveFile& drive, io::IoEngine& io) {
  constexpr Bytes kProbe = 16_MiB;
  drive.grow(kProbe);
  memory::HostBuffer memory(kProbe);
  std::ranges::fill(memory.bytes(), std::byte{0x5A});
  io.write(drive.file(), Bytes(), memory.bytes())->wait();  // each block gets its place
  const auto begin = std::chrono::steady_clock::now();
  io.write(drive.file(), Bytes(), memory.bytes())->wait();
  io.read(drive.file(), Bytes(), memory.bytes())->wait();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  drive.count_written(kProbe * 2);
  drive.shrink(Bytes());
  return static_cast<double>(kProbe.value) * 2 / std::max(seconds.count(), 1e-9);
}

class StripedBlockFile final : public BlockFile {
 public:
  StripedBlockFile(std::shared_ptr<io::IoEngine> io, std::vector<DriveFile> files)
      : io_(std::move(io)), files_(std::move(files)), striping_(speeds_of(files_, *io_)) {
    path_ = files_.front().file().path();
    if (files_.size() > 1) path_ += fmt::format(" and {} more", files_.size() - 1);
  }

  const std::string& path() const override { return path_; }

  void grow(Bytes size) override {
    std::vector<Bytes> before;
    for (const DriveFile& file : files_) before.push_back(file.size());
    try {
      for (std::size_t part = 0; part < files_.size(); ++part)
        files_[part].grow(striping_.share_of(part, size));
    } catch (...) {
      for (std::size_t part = 0; part < files_.size(); ++part) files_[part].shrink(before[part]);
      throw;
    }
  }

  std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) override {
    return transfer(offset, target, [this](const auto&... range) { return io_->read(range...); });
  }
  std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) override {
    for (const io::Striping::Run& run : striping_.runs_of(offset, Bytes(source.size())))
      files_[run.part].count_written(run.bytes);
    return transfer(offset, source, [this](const auto&... range) { return io_->write(range...); });
  }
  void expect_memory(std::span<std::byte> memory) override {
    registration_ = io_->register_memory(memory);
  }
  std::vector<DriveWrites> drive_writes() const override {
    std::vector<DriveWrites> all;
    for (const DriveFile& file : files_) all.push_back(file.drive_writes());
    return all;
  }

 private:
  static std::vector<double> speeds_of(std::vector<DriveFile>& files, io::IoEngine& io) {
    if (files.size() == 1) return {1.0};
    std::vector<double> speeds;
    for (DriveFile& file : files) speeds.push_back(measure_speed(file, io));
    return speeds;
  }

  template <typename Span, typename Start>
  std::unique_ptr<io::Transfer> transfer(Bytes offset, Span memory, const Start& start) {
    std::vector<std::unique_ptr<io::Transfer>> transfers;
    for (const io::Striping::Run& run : striping_.runs_of(offset, Bytes(memory.size())))
      transfers.push_back(start(files_[run.part].file(), run.offset,
                                memory.subspan(run.begin.size(), run.bytes.size())));
    return io::joined(std::move(transfers));
  }

  const std::shared_ptr<io::IoEngine> io_;
  std::vector<DriveFile> files_;
  const io::Striping striping_;
  std::string path_;
  std::unique_ptr<io::MemoryRegistration> registration_;  // null: none was asked for
};

constexpr Bytes kTransfer = 1_MiB;
constexpr std::int64_t kAtOnce = 8;
constexpr Bytes kAll = kTransfer * kAtOnce;
// A fast drive gets more than one round of them, so that what it takes to begin counts little.
constexpr Bytes kMost = kAll * 4;
constexpr double kSecondsEnough = 0.02;

}  // namespace

FileSystem file_system_of(const std::string& path) {
  struct statfs status {};
  if (::statfs(path.c_str(), &status) != 0) return {};
  const auto magic = static_cast<std::uint32_t>(status.f_type);
  const auto* const found = std::ranges::find(kFileSystems, magic, &KnownFileSystem::magic);
  if (found != kFileSystems.end()) return {found->name, found->medium};
  return {fmt::format("type {:#x}", magic), Medium::kDrive};
}

void fill_with_noise(std::span<std::byte> bytes) {
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t noise = random();
    std::memcpy(bytes.data() + i, &noise, sizeof(noise));
  }
}

SwapFolder::SwapFolder(const std::string& path, int rank) : owner_(::getpid()) {
  require_folder(path);
  std::error_code failed;
  root_ = std::filesystem::absolute(path, failed).string();
  if (failed) root_ = path;
  file_system_ = file_system_of(root_);
  remove_leftovers();
  // Another rank that looks for leftovers may take a folder for one until it is locked.
  for (int attempt = 0; !make(rank); ++attempt) {
    if (attempt < kAttempts) continue;
    throw IoError(
        "cannot make a folder for states on a drive: something removes it at once: path={}", root_);
  }
}

SwapFolder::~SwapFolder() {
  if (folder_.empty() || owner_ != ::getpid()) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

bool SwapFolder::make(int rank) {
  std::string folder = below(root_, fmt::format("{}rank{}.XXXXXX", kPrefix, rank));
  if (::mkdtemp(folder.data()) == nullptr)
    io::throw_errno(
        "cannot make a folder for states on a drive; choose a path that this user may write to",
        root_);
  const std::string lock_path = below(folder, kLockName);
  FileDescriptor file(
      ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) {
    const int code = errno;
    ::rmdir(folder.c_str());
    if (code == ENOENT) return false;
    errno = code;
    io::throw_errno("cannot make a file for states on a drive", lock_path);
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
    if (name.starts_with(kPrefix)) remove_leftover(below(root_, name));
    entries.increment(failed);
  }
}

void SwapFolder::remove_leftover(const std::string& folder) const {
  const FileDescriptor opened(
      ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!opened.valid() || ::fstat(opened.get(), &status) != 0 || status.st_uid != ::geteuid())
    return;
  FileDescriptor file(
      ::openat(opened.get(), std::string(kLockName).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  // Its owner died before it had a lock; or lives, and makes another one when this is gone. Where a
  // lock is there, the folder stays.
  if (!file.valid()) return static_cast<void>(::rmdir(folder.c_str()));
  io::FileLock lock(std::move(file));
  if (lock.take() != io::FileLock::Outcome::kTaken) return;
  if (file_system_.medium == Medium::kNetwork && !is_of_this_host(lock.file().get())) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

std::string SwapFolder::warning() const {
  std::string text;
  if (file_system_.medium == Medium::kMemory) {
    text = fmt::format(
        "states that are to lie on a drive lie in memory: {} is on {}, which takes the memory that "
        "this is meant to save",
        root_, file_system_.name);
  } else if (file_system_.medium == Medium::kNetwork) {
    text = fmt::format(
        "states that are to lie on a drive lie on a network file system: {} is on {}; every step "
        "reads and writes all of them over the network, and a local drive is faster",
        root_, file_system_.name);
  }
  if (locks_) return text;
  return fmt::format(
      "{}{}{} has no locks, so the folders of killed jobs stay until you remove them", text,
      text.empty() ? "" : "; ", root_);
}

std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::vector<std::unique_ptr<SwapFolder>> folders) {
  std::vector<DriveFile> files;
  for (std::unique_ptr<SwapFolder>& folder : folders) files.emplace_back(std::move(folder));
  return std::make_unique<StripedBlockFile>(std::move(io), std::move(files));
}

DriveLimit measure_drive(BlockFile& file, Bytes begin) {
  using Clock = std::chrono::steady_clock;
  file.grow(begin + kAll);
  memory::HostBuffer buffer(kAll);
  fill_with_noise(buffer.bytes());
  const auto gb_per_s = [&](const auto& start) {
    checkpoint::TransferRing ring(buffer.bytes(), kTransfer);
    const Clock::time_point began = Clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(Clock::now() - began).count();
    };
    Bytes moved;
    for (; moved < kAll || (moved < kMost && seconds() < kSecondsEnough); moved += kTransfer) {
      const std::size_t turn = ring.next();
      ring.started(turn, start(begin + moved % kAll, ring.buffer(turn)));
    }
    ring.drain();
    return static_cast<double>(moved.value) / seconds() * 1e-9;
  };
  DriveLimit limit;
  // First, for there to be something to read: space that was only taken reads as zeroes, from
  // nowhere.
  limit.write_gb_per_s = gb_per_s([&](Bytes at, auto bytes) { return file.write(at, bytes); });
  limit.read_gb_per_s = gb_per_s([&](Bytes at, auto bytes) { return file.read(at, bytes); });
  return limit;
}

}  // namespace strata::offload
