#include "strata/io/folder_calls.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/io/pending_range.h"

namespace strata::io {
namespace {

// The permissions of an ordinary new file of this process. umask(2) tells its value only by a
// change, for a moment, in all threads.
mode_t usual_permissions() {
  constexpr mode_t kAll = 0666;
  constexpr mode_t kWritableByOwner = 0644;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "Umask:") continue;
    unsigned mask = 0;
    if (status >> std::oct >> mask) return kAll & ~static_cast<mode_t>(mask);
  }
  return kWritableByOwner;
}

constexpr std::string_view kSuffix = ".partial";
constexpr std::size_t kDigits = 16;

}  // namespace

void FolderCalls::make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return;
  throw_errno("cannot make a folder", path);
}

File FolderCalls::create(const std::string& path) {
  return File(path, File::Mode::kCreateNew);
}

std::optional<Bytes> FolderCalls::free_space(const std::string& folder) {
  struct statvfs status {};
  // Some file systems of networks say that they have no blocks at all.
  if (::statvfs(folder.c_str(), &status) != 0 || status.f_blocks == 0) return std::nullopt;
  return Bytes(static_cast<std::int64_t>(status.f_bavail) *
               static_cast<std::int64_t>(status.f_frsize));
}

void FolderCalls::sync_folder(const std::string& path) {
  const std::string folder = path.empty() ? std::string(".") : path;
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const bool synced = opened.valid() && ::fsync(opened.get()) == 0;
  // Some file systems cannot fsync a folder, and need not.
  if (synced || errno == EINVAL || errno == ENOTSUP) return;
  throw_errno("cannot bring a folder to disk", folder);
}

void FolderCalls::rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  throw IoError("cannot rename what is finished: from={} to={} {}", from, to, errno_text(errno));
}

bool FolderCalls::exchange(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0)
    return true;
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return false;
  throw IoError("cannot exchange the names of two folders: {} {} {}", one, other,
                errno_text(errno));
}

void FolderCalls::remove_tree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) throw IoError("cannot remove: path={} {}", path, error.message());
}

void FolderCalls::open_to_others(const File& file) {
  if (::fchmod(file.fd(), usual_permissions()) == 0) return;
  throw_errno("cannot set a file's permissions", file.path());
}

std::string temporary_name(const std::string& path) {
  std::random_device random;  // the kernel's
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  return fmt::format("{}.{:016x}{}", path, number, kSuffix);
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), file_(temporary_name(path_), File::Mode::kCreateNew) {}

AtomicFile::~AtomicFile() {
  if (!published_) ::unlink(file_.path().c_str());
}

void AtomicFile::seal() {
  file_.sync();
  sealed_ = true;
}

void AtomicFile::publish() {
  if (!sealed_) seal();
  FolderCalls calls;
  calls.open_to_others(file_);
  calls.rename(file_.path(), path_);
  published_ = true;
  calls.sync_folder(std::filesystem::path(path_).parent_path().string());
}

std::string_view AtomicFile::target_of(std::string_view name) {
  if (!name.ends_with(kSuffix)) return name;
  std::string_view target = name.substr(0, name.size() - kSuffix.size());
  if (target.size() <= kDigits + 1 || target[target.size() - kDigits - 1] != '.') return name;
  const std::string_view digits = target.substr(target.size() - kDigits);
  if (digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) return name;
  return target.substr(0, target.size() - kDigits - 1);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  write_fully(file.file(), Bytes(), std::as_bytes(std::span(text)));
  file.publish();
}

bool remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  throw_errno("cannot remove a file", path);
}

}  // namespace strata::io
