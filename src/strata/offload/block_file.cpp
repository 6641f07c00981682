#include "strata/offload/block_file.h"

#include <fmt/core.h>

#include <utility>

#include "strata/io/striping.h"
#include "strata/offload/drive_file.h"

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
      files_[run.part].note_written(run.bytes);
    return transfer(offset, source, [this](const auto&... range) { return io_->write(range...); });
  }
  void expect_memory(std::span<std::byte> memory) override {
    registration_ = io_->register_memory(memory);
  }
  std::vector<DriveWrites> wear() const override {
    std::vector<DriveWrites> wear;
    for (const DriveFile& file : files_) wear.push_back(file.wear());
    return wear;
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

}  // namespace

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

}  // namespace strata::offload
