#include "strata/offload/drive_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {

void DriveFile::grow(Bytes size) {
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

void DriveFile::shrink(Bytes size) noexcept {
  [[maybe_unused]] const int result = ::ftruncate(file_.fd(), size.value);
  size_ = std::min(size_, size);
}

DriveWrites DriveFile::wear() const {
  const std::filesystem::path place(folder_ != nullptr ? folder_->path() : file_.path());
  return {place.parent_path().string(), written_};
}

Bytes DriveFile::free_bytes() const {
  struct statvfs status {};
  if (::fstatvfs(file_.fd(), &status) != 0) return Bytes();
  const Bytes block(static_cast<std::int64_t>(status.f_frsize));
  return block * static_cast<std::int64_t>(status.f_bavail);
}

void DriveFile::refuse(Bytes more, Bytes free, int code) const {
  throw OutOfMemoryError(fmt::format(
      "there is too little space for states on the drive: {} wanted beside {} taken, {} free; free "
      "some, choose another drive or shard over more ranks: path={} wanted={} free={} {}",
      to_string(more), to_string(size_), to_string(free), file_.path(), more.value, free.value,
      errno_text(code)));
}

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
  drive.note_written(kProbe * 2);
  drive.shrink(Bytes());
  return static_cast<double>(kProbe.value) * 2 / std::max(seconds.count(), 1e-9);
}

}  // namespace strata::offload
