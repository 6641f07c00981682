// A peer's shared memory on the CPU device: pages of its file, mapped one behind the other.
// Threads, ownership: shared_memory.h. Errors: DeviceError.
#pragma once

#include <span>

#include "strata/device/shared_memory.h"

namespace strata::device {

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
