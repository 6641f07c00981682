#include "strata/offload/block_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"
#include "strata/io/file.h"

namespace strata::offload {
namespace {

class SingleBlockFile final : public BlockFile {
 public:
  // `folder`: null where somebody else keeps it.
  SingleBlockFile(std::shared_ptr<io::IoEngine> io, const std::string& path,
                  std::unique_ptr<SwapFolder> folder)
      : folder_(std::move(folder)),
        io_(std::move(io)),
        file_(io::File(path, io::File::Mode::kCreateNew).direct()) {}

  const std::string& path() const override { return file_.path(); }

  void grow(Bytes size) override {
    const Bytes more = size - size_;
    if (more.value <= 0) return;
    // Asked first: to fill a drive to its end would take from others what they are about to write.
    if (const Bytes free = free_bytes(); free < more) refuse(more, free, ENOSPC);
    int code = 0;
    do {
      code = ::posix_fallocate(file_.fd(), size_.value, more.value);
    } while (code == EINTR);
    if (code != 0) {
      // What was taken of it.
      [[maybe_unused]] const int result = ::ftruncate(file_.fd(), size_.value);
      refuse(more, free_bytes(), code);
    }
    size_ = size;
  }

  std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) override {
    return io_->read(file_, offset, target);
  }
  std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) override {
    std::unique_ptr<io::Transfer> transfer = io_->write(file_, offset, source);
    written_ += Bytes(source.size());
    return transfer;
  }
  // A folder that goes with the file is told by the one that users named.
  std::vector<DriveWear> wear() const override {
    const std::filesystem::path place(folder_ != nullptr ? folder_->path() : path());
    return {{place.parent_path().string(), written_}};
  }

 private:
  Bytes free_bytes() const {
    struct statvfs status {};
    if (::fstatvfs(file_.fd(), &status) != 0) return Bytes();
    const Bytes block(static_cast<std::int64_t>(status.f_frsize));
    return block * static_cast<std::int64_t>(status.f_bavail);
  }

  [[noreturn]] void refuse(Bytes more, Bytes free, int code) const {
    throw OutOfMemoryError(fmt::format(
        "there is too little space for states on the drive: {} wanted beside {} taken, {} "
        "free; free some, choose another drive or shard over more ranks: path={} wanted={} "
        "free={} {}",
        to_string(more), to_string(size_), to_string(free), path(), more.value, free.value,
        errno_text(code)));
  }

  const std::unique_ptr<SwapFolder> folder_;  // removed when the file is closed
  const std::shared_ptr<io::IoEngine> io_;
  const io::File file_;
  Bytes size_;
  Bytes written_;
};

}  // namespace

std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           const std::string& path) {
  return std::make_unique<SingleBlockFile>(std::move(io), path, nullptr);
}

std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::unique_ptr<SwapFolder> folder) {
  const std::string path = fmt::format("{}/states", folder->path());
  return std::make_unique<SingleBlockFile>(std::move(io), path, std::move(folder));
}

}  // namespace strata::offload
