// An IoEngine whose transfers go past the page cache, by another engine. They go through memory
// that is aligned to blocks as the range is in the file: bytes to write are copied there first, and
// read bytes are copied from there. Direct transfers must keep all promises of an engine, too.
// Threads: as IoEngine.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
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

class DirectTransfers final : public io::IoEngine {
 public:
  explicit DirectTransfers(std::unique_ptr<io::IoEngine> engine) : engine_(std::move(engine)) {}

  std::string_view name() const override { return "direct transfers"; }
  std::unique_ptr<io::Transfer> read(const io::File& file, Bytes offset,
                                     std::span<std::byte> target) override {
    return std::make_unique<Read>(*engine_, file, offset, target);
  }
  std::unique_ptr<io::Transfer> write(const io::File& file, Bytes offset,
                                      std::span<const std::byte> source) override {
    return std::make_unique<Write>(*engine_, file, offset, source);
  }

 private:
  static std::size_t past_block(Bytes offset) {
    return static_cast<std::size_t>(
        std::max<std::int64_t>(0, offset.value % io::File::kDirectBlock.value));
  }

  class Write final : public io::Transfer {
   public:
    Write(io::IoEngine& engine, const io::File& file, Bytes offset,
          std::span<const std::byte> source)
        : file_(file.direct()), memory_(source.size(), past_block(offset)) {
      std::ranges::copy(source, memory_.bytes().begin());
      transfer_ = engine.write(file_, offset, memory_.bytes());
    }
    bool done() override { return transfer_->done(); }
    std::optional<io::TransferTimes> times() const override { return transfer_->times(); }
    void wait() override { transfer_->wait(); }

   private:
    io::File file_;
    BlockMemory memory_;
    std::unique_ptr<io::Transfer> transfer_;
  };

  class Read final : public io::Transfer {
   public:
    Read(io::IoEngine& engine, const io::File& file, Bytes offset, std::span<std::byte> target)
        : file_(file.direct()),
          memory_(target.size(), past_block(offset)),
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
    std::optional<io::TransferTimes> times() const override { return transfer_->times(); }
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
