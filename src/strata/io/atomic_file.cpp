#include "strata/io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <utility>

#include "strata/base/errno_text.h"
#include "strata/io/pending_range.h"

namespace strata::io {
namespace {

// A temporary is called "<path>.<16 hexadecimal digits>.partial".
constexpr std::string_view kSuffix = ".partial";
constexpr std::size_t kDigits = 16;

std::string temporary_name(const std::string& path) {
  std::random_device random;  // the kernel's
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  return fmt::format("{}.{:016x}{}", path, number, kSuffix);
}

// What a file that anybody makes in this process may be used for. To ask the system by umask(2)
// is to change it for a moment, in all threads.
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

// A rename survives a power failure only after the folder itself was brought to disk.
void sync_folder_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? std::string(".") : parent.string();
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const bool synced = opened.valid() && ::fsync(opened.get()) == 0;
  // Some file systems cannot fsync a folder, and need not.
  if (synced || errno == EINVAL || errno == ENOTSUP) return;
  const int code = errno;
  throw IoError(fmt::format("cannot bring a folder to disk: path={} {}", folder, errno_text(code)));
}

}  // namespace

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
  if (::fchmod(file_.fd(), usual_permissions()) != 0) {
    const int code = errno;
    throw IoError(
        fmt::format("cannot set a file's permissions: path={} {}", file_.path(), errno_text(code)));
  }
  if (::rename(file_.path().c_str(), path_.c_str()) != 0) {
    const int code = errno;
    throw IoError(fmt::format("cannot rename a finished file: from={} to={} {}", file_.path(),
                              path_, errno_text(code)));
  }
  published_ = true;
  sync_folder_of(path_);
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
  const int code = errno;
  if (code == ENOENT) return false;
  throw IoError(fmt::format("cannot remove a file: path={} {}", path, errno_text(code)));
}

}  // namespace strata::io
