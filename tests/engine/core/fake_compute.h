// A FakeRank's model computes here: on a CPU device at once; on a LateDevice some time later, in
// the order of the compute stream, as the kernels of a GPU's model do. Threads: its rank's.
// Ownership: memory() may outlive this.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device/late_device.h"

namespace strata::engine::fake {

class FakeCompute {
 public:
  explicit FakeCompute(std::shared_ptr<device::CpuDevice> device)
      : device_(std::move(device)), late_(dynamic_cast<device::LateDevice*>(device_.get())) {}

  const std::shared_ptr<device::CpuDevice>& device() const { return device_; }

  void run(const std::function<void()>& kernel) {
    if (late_ == nullptr) {
      kernel();
    } else {
      late_->enqueue(late_->compute_stream(), kernel);
    }
  }
  // After it the host may read the results. It learns nothing of other streams by the call.
  void settle() { device_->compute_stream().synchronize(); }

  // Returns memory that later kernels get when its last owner has gone. As in frameworks, the
  // memory does not wait for kernels that still use it.
  std::shared_ptr<std::byte> memory(Bytes bytes) {
    if (late_ == nullptr) return {new std::byte[bytes.size()], std::default_delete<std::byte[]>()};
    auto& free = (*free_)[bytes.size()];
    std::unique_ptr<device::Memory> memory;
    if (free.empty()) {
      memory = device_->allocate_uncharged(bytes);
    } else {
      memory = std::move(free.back());
      free.pop_back();
    }
    std::byte* const begin = memory->bytes().data();
    return {begin, [free = free_, memory = memory.release()](std::byte*) {
              (*free)[memory->bytes().size()].emplace_back(memory);
            }};
  }

 private:
  using Free = std::map<std::size_t, std::vector<std::unique_ptr<device::Memory>>>;

  std::shared_ptr<device::CpuDevice> device_;
  device::LateDevice* late_;  // null: another
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace strata::engine::fake
