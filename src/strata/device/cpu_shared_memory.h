// Memory of the CPU device that grows, and memory of peers that it maps.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/memory/ledger.h"

namespace strata::device {

// GrowableMemory of the CPU device: an address range reserved without access, of which a prefix is
// made readable and writable, page by page. The kernel backs pages with zeroes when they are first
// touched. Shared pages belong to an anonymous file, which peers map.
// Threads: one at a time. Ownership: frees range and charge on destruction.
// Units: the granule is the page; whole pages are charged.
// Errors: OutOfMemoryError when the system or the budget refuses, UsageError for growth beyond the
// range.
class CpuGrowableMemory final : public GrowableMemory {
 public:
  enum class Pages { kPrivate, kShared };

  // `budget` may be null: no bound but the system's.
  CpuGrowableMemory(Bytes bytes, memory::Kind kind, std::shared_ptr<memory::Ledger> ledger,
                    std::shared_ptr<memory::ByteBudget> budget, Pages pages = Pages::kPrivate);
  ~CpuGrowableMemory() override;
  CpuGrowableMemory(const CpuGrowableMemory&) = delete;
  CpuGrowableMemory& operator=(const CpuGrowableMemory&) = delete;

  std::byte* base() override { return base_; }
  Bytes reserved() const override { return reserved_; }
  Bytes backed() const override { return backed_; }
  void grow_to(Bytes bytes) override;
  void release() override;
  std::size_t pieces() const override { return pieces_.size(); }
  SharedHandle piece(std::size_t index) const override;

 private:
  struct Piece {
    Bytes offset;
    Bytes bytes;
    memory::ByteBudget::Hold hold;
  };
  [[noreturn]] void throw_out_of_memory(Bytes wanted, const std::string& reason) const;

  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<memory::ByteBudget> budget_;
  const memory::Kind kind_;
  const Bytes reserved_;
  std::byte* base_ = nullptr;  // null when reserved_ is 0
  Bytes backed_;
  memory::Charge charge_;
  FileDescriptor file_;        // of shared pages
  std::vector<Piece> pieces_;  // one a growth
};

// A peer's shared memory on the CPU device: pages of its file, mapped one behind the other.
// Threads, ownership: device.h. Errors: DeviceError.
class CpuPeerMapping final : public PeerMapping {
 public:
  explicit CpuPeerMapping(Bytes bytes);
  ~CpuPeerMapping() override;
  CpuPeerMapping(const CpuPeerMapping&) = delete;
  CpuPeerMapping& operator=(const CpuPeerMapping&) = delete;

  const std::byte* base() const override { return range_.data(); }
  Bytes mapped() const override { return mapped_; }
  std::size_t pieces() const override { return pieces_; }
  void add(SharedHandle piece) override;

 private:
  std::span<std::byte> range_;  // reserved without access
  Bytes mapped_;
  std::size_t pieces_ = 0;
};

}  // namespace strata::device
