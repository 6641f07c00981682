// An IoEngine that reads every file past the page cache, by another engine: into memory that lies
// to blocks as the range does to the file's, from where the bytes are copied when the transfer is
// over. Whatever an engine promises must hold of direct reads, too. Threads: as IoEngine.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "strata/io/io_engine.h"

namespace strata::testing {

// Memory whose address is `past` bytes beyond a multiple of File::kDirectBlock.
class BlockMemory {
 public:
  BlockMemory(std::size_t bytes, std::size_t past) : memory_(bytes + 2 * kBlock) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    bytes_ = std::span(memory_).subspan(kBlock - address % kBlock + past, bytes);
  }
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;
  std::span<std::byte> bytes() { return bytes_; }

 private:
  static constexpr std::size_t kBlock = io::File::kDirectBlock.size();
  std::vector<std::byte> memory_;
  std::span<std::byte> bytes_;
};

class DirectReads final : public io::IoEngine {
 public:
  explicit DirectReads(std::unique_ptr<io::IoEngine> engine) : engine_(std::move(engine)) {}

  std::string_view name() const override { return "direct reads"; }
  std::unique_ptr<io::Transfer> read(const io::File& file, Bytes offset,
                                     std::span<std::byte> target) override {
    return std::make_unique<Read>(*engine_, file, offset, target);
  }
  std::unique_ptr<io::Transfer> write(const io::File& file, Bytes offset,
                                      std::span<const std::byte> source) override {
    return engine_->write(file, offset, source);
  }

 private:
  class Read final : public io::Transfer {
   public:
    Read(io::IoEngine& engine, const io::File& file, Bytes offset, std::span<std::byte> target)
        : file_(file.direct()),
          memory_(target.size(), static_cast<std::size_t>(std::max<std::int64_t>(
                                     0, offset.value % io::File::kDirectBlock.value))),
          target_(target),
          transfer_(engine.read(file_, offset, memory_.bytes())) {}
    ~Read() override {
      try {
        wait();
      } catch (const std::exception&) {
        return;
      }
    }
    bool done() override { return transfer_->done(); }
    void wait() override {
      transfer_->wait();
      std::ranges::copy(memory_.bytes(), target_.begin());
    }

   private:
    io::File file_;
    BlockMemory memory_;
    std::span<std::byte> target_;
    std::unique_ptr<io::Transfer> transfer_;
  };

  std::unique_ptr<io::IoEngine> engine_;
};

}  // namespace strata::testing
