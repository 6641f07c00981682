// A CPU device that gives out no more than a number of bytes, so that a test can exhaust it. The
// limit counts all memory of the device, charged or not; memory of the host it does not count.
// Threads, ownership: device.h; memory may outlive the device, and gives its bytes back at its end.
// Errors: OutOfMemoryError beyond the limit, with the bytes wanted, those left, and the ledger's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"
#include "strata/memory/host_buffer.h"

namespace strata::device {

// The bytes that a limited device has left.
class Room {
 public:
  using Part = std::shared_ptr<void>;  // gives its bytes back at its end

  Room(Bytes limit, std::shared_ptr<memory::Ledger> ledger)
      : left_(std::make_shared<std::atomic<std::int64_t>>(limit.value)),
        ledger_(std::move(ledger)) {}

  Bytes left() const { return Bytes(left_->load()); }
  Part take(Bytes bytes, std::string_view what) const {
    std::int64_t now = left_->load();
    do {
      if (bytes.value > now) {
        throw OutOfMemoryError("device cpu is out of memory ({}): {} wanted, {} left; held: {}",
                               what, to_string(bytes), to_string(Bytes(now)), ledger_->report());
      }
    } while (!left_->compare_exchange_weak(now, now - bytes.value));
    return {left_.get(), [counter = left_, bytes](void*) { *counter += bytes.value; }};
  }

 private:
  std::shared_ptr<std::atomic<std::int64_t>> left_;
  std::shared_ptr<memory::Ledger> ledger_;
};

class LimitedDevice final : public CpuDevice {
 public:
  explicit LimitedDevice(Bytes limit, CpuDeviceOptions options = {})
      : CpuDevice(std::move(options)), room_(limit, ledger()) {}

  std::unique_ptr<Memory> allocate(Bytes bytes, memory::Kind kind) override {
    Room::Part part = room_.take(bytes, memory::name_of(kind));
    return std::make_unique<LimitedMemory>(std::move(part), CpuDevice::allocate(bytes, kind));
  }
  std::unique_ptr<Memory> allocate_uncharged(Bytes bytes) override {
    Room::Part part = room_.take(bytes, "shared buffers");
    return std::make_unique<LimitedMemory>(std::move(part), CpuDevice::allocate_uncharged(bytes));
  }
  std::unique_ptr<GrowableMemory> reserve(Bytes bytes, memory::Kind kind) override {
    return std::make_unique<LimitedGrowableMemory>(room_, kind, CpuDevice::reserve(bytes, kind));
  }
  std::unique_ptr<GrowableMemory> reserve_shared(Bytes bytes, memory::Kind kind) override {
    return std::make_unique<LimitedGrowableMemory>(room_, kind,
                                                   CpuDevice::reserve_shared(bytes, kind));
  }
  Bytes free_bytes() const override { return std::min(CpuDevice::free_bytes(), room_.left()); }

 private:
  class LimitedMemory final : public Memory {
   public:
    LimitedMemory(Room::Part part, std::unique_ptr<Memory> memory)
        : part_(std::move(part)), memory_(std::move(memory)) {}
    std::span<std::byte> bytes() override { return memory_->bytes(); }

   private:
    Room::Part part_;
    std::unique_ptr<Memory> memory_;
  };

  class LimitedGrowableMemory final : public GrowableMemory {
   public:
    LimitedGrowableMemory(Room room, memory::Kind kind, std::unique_ptr<GrowableMemory> memory)
        : room_(std::move(room)), kind_(kind), memory_(std::move(memory)) {}
    std::byte* base() override { return memory_->base(); }
    Bytes reserved() const override { return memory_->reserved(); }
    Bytes backed() const override { return memory_->backed(); }
    void grow_to(Bytes bytes) override {
      if (bytes <= backed() || bytes > reserved()) return memory_->grow_to(bytes);
      const Bytes growth = align_up(bytes, memory::page_size()) - backed();
      Room::Part part = room_.take(growth, memory::name_of(kind_));
      memory_->grow_to(bytes);
      parts_.push_back(std::move(part));
    }
    void release() override {
      memory_->release();
      parts_.clear();
    }
    std::size_t pieces() const override { return memory_->pieces(); }
    SharedHandle piece(std::size_t index) const override { return memory_->piece(index); }

   private:
    Room room_;
    memory::Kind kind_;
    std::vector<Room::Part> parts_;  // one a growth
    std::unique_ptr<GrowableMemory> memory_;
  };

  const Room room_;
};

}  // namespace strata::device
