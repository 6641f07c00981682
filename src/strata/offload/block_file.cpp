#include "strata/offload/block_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <utility>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"
#include "strata/io/striping.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

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
    for (const io::Striping::Run& run : striping_.runs_of(offset, Bytes(memory.size()))) {
      transfers.push_back(start(files_[run.part].file(), run.offset,
                                memory.subspan(run.begin.size(), run.bytes.size())));
    }
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

// Some drives store zeroes without writing any.
void fill_with_noise(std::span<std::byte> bytes) {
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t noise = random();
    std::memcpy(bytes.data() + i, &noise, sizeof(noise));
  }
}

}  // namespace

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

DriveWrites DriveFile::drive_writes() const {
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
  drive.count_written(kProbe * 2);
  drive.shrink(Bytes());
  return static_cast<double>(kProbe.value) * 2 / std::max(seconds.count(), 1e-9);
}

std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           const std::string& path) {
  std::vector<DriveFile> files;
  files.emplace_back(path, nullptr);
  return std::make_unique<StripedBlockFile>(std::move(io), std::move(files));
}

std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::vector<std::unique_ptr<SwapFolder>> folders) {
  std::vector<DriveFile> files;
  for (std::unique_ptr<SwapFolder>& folder : folders) {
    const std::string path = fmt::format("{}/states", folder->path());
    files.emplace_back(path, std::move(folder));
  }
  return std::make_unique<StripedBlockFile>(std::move(io), std::move(files));
}

DriveLimit measure_drive(BlockFile& file, Bytes begin) {
  using Clock = std::chrono::steady_clock;
  file.grow(begin + kAll);
  memory::HostBuffer buffer(kAll);
  fill_with_noise(buffer.bytes());
  const auto gb_per_s = [&](const auto& start) {
    std::array<std::unique_ptr<io::Transfer>, static_cast<std::size_t>(kAtOnce)> transfers;
    const Clock::time_point began = Clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(Clock::now() - began).count();
    };
    Bytes moved;
    for (std::int64_t i = 0; moved < kAll || (moved < kMost && seconds() < kSecondsEnough); ++i) {
      std::unique_ptr<io::Transfer>& slot = transfers.at(static_cast<std::size_t>(i % kAtOnce));
      if (slot != nullptr) std::exchange(slot, nullptr)->wait();
      const Bytes at = kTransfer * (i % kAtOnce);
      slot = start(begin + at, buffer.bytes().subspan(at.size(), kTransfer.size()));
      moved += kTransfer;
    }
    for (const auto& transfer : transfers) transfer->wait();
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
