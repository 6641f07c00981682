#include "strata/io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/errno_text.h"

namespace strata::io {
namespace {

// A rename survives a power failure only after the folder itself was brought to disk.
void sync_folder_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? std::string(".") : parent.string();
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int code = fd < 0 ? errno : 0;
  if (fd >= 0) {
    if (::fsync(fd) != 0) code = errno;
    ::close(fd);
  }
  // Some file systems cannot fsync a folder, and need not.
  if (code != 0 && code != EINVAL && code != ENOTSUP) {
    throw IoError(
        fmt::format("cannot bring a folder to disk: path={} {}", folder, errno_text(code)));
  }
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), file_(path_ + kPartialSuffix, File::Mode::kCreate) {}

AtomicFile::~AtomicFile() {
  if (!published_) ::unlink(file_.path().c_str());
}

void AtomicFile::seal() {
  file_.sync();
  sealed_ = true;
}

void AtomicFile::publish() {
  if (!sealed_) seal();
  if (::rename(file_.path().c_str(), path_.c_str()) != 0) {
    const int code = errno;
    throw IoError(fmt::format("cannot rename a finished file: from={} to={} {}", file_.path(),
                              path_, errno_text(code)));
  }
  published_ = true;
  sync_folder_of(path_);
}

bool remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return true;
  const int code = errno;
  if (code == ENOENT) return false;
  throw IoError(fmt::format("cannot remove a file: path={} {}", path, errno_text(code)));
}

}  // namespace strata::io
