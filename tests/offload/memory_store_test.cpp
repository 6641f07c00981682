#include "offload/parking_conformance.h"
#include "offload/store_harness.h"
#include "strata/offload/make_store.h"

namespace strata::offload {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(OnHost, StateStoreConformance, HostHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnPinnedHost, StateStoreConformance, PinnedHostHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnCpuDevice, StateStoreConformance, CpuDeviceHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnPinnedHost, ParkingConformance, PinnedHostHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnCpuDevice, ParkingConformance, CpuDeviceHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnLateDevice, ParkingConformance, LateDeviceHarness);

TEST(MemoryStore, WhatFindsNoRoomOnTheDeviceStaysParked) {
  device::LimitedDevice device(10'000_B);
  const auto store = make_memory_store(memory::Tier::kDevice, device);
  const BlockId block = store->add("block", 6000_B, memory::Kind::kOptimizerState);
  store->fetch(block, Access::kReadWrite)->bytes()[5999] = std::byte{7};
  store->offload_states(memory::Kind::kOptimizerState, true);
  auto others = device.allocate(8000_B, memory::Kind::kStaging);
  EXPECT_THROW(store->reload_states(), OutOfMemoryError);
  EXPECT_THROW(store->fetch(block, Access::kRead), UsageError);
  others.reset();
  store->reload_states();
  EXPECT_EQ(store->fetch(block, Access::kRead)->bytes()[5999], std::byte{7});
  EXPECT_EQ(device.ledger()->held(memory::Tier::kHost), 0_B);
}

TEST(MemoryStore, ALeaseKeepsItsBlockWhenTheStoreGoes) {
  device::CpuDevice device;
  auto store = make_memory_store(memory::Tier::kHost, device);
  const auto lease =
      store->fetch(store->add("block", 10_B, memory::Kind::kMasterWeights), Access::kRead);
  store.reset();
  EXPECT_EQ(lease->bytes()[9], std::byte{0});
}

// A device whose system locks no memory.
class UnpinningDevice final : public device::CpuDevice {
 public:
  std::unique_ptr<device::HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override {
    class Unpinned final : public device::HostMemory {
     public:
      explicit Unpinned(std::unique_ptr<device::HostMemory> memory) : memory_(std::move(memory)) {}
      std::span<std::byte> bytes() override { return memory_->bytes(); }
      bool pinned() const override { return false; }

     private:
      std::unique_ptr<device::HostMemory> memory_;
    };
    return std::make_unique<Unpinned>(CpuDevice::allocate_host(bytes, kind));
  }
};

TEST(MemoryStore, HostMemoryThatKernelsWouldNotReachIsRefused) {
  UnpinningDevice device;
  const auto store = make_memory_store(memory::Tier::kHost, device);
  const auto message = testing::message_of<OutOfMemoryError>(
      [&] { store->add("layers.0.exp_avg", 5000_B, memory::Kind::kOptimizerState); });
  EXPECT_THAT(message, ::testing::HasSubstr("ulimit -l"));
  EXPECT_THAT(message, ::testing::HasSubstr("4.88 KiB wanted"));
  EXPECT_EQ(device.ledger()->held(memory::Tier::kHost), 0_B);
}

}  // namespace
}  // namespace strata::offload
