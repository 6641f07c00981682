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

// Blocks of the host, of which the first two are cached on a device that runs ahead.
class CachedBlocks : public ::testing::Test {
 protected:
  CachedBlocks() {
    for (int i = 0; i < 3; ++i) {
      blocks_.push_back(store_->add("block", 6000_B, memory::Kind::kOptimizerState));
      fill(i, static_cast<std::byte>(i + 1));
    }
    EXPECT_TRUE(store_->cache(std::span(blocks_).first(2), *stream_));
  }
  // In the stream, as kernels write.
  void fill(int index, std::byte value) {
    const auto lease = store_->fetch(block(index), Access::kReadWrite);
    const std::span<std::byte> bytes = lease->bytes();
    device_.enqueue(*stream_, [bytes, value] { std::ranges::fill(bytes, value); });
    lease->used_in(*stream_);
  }
  void expect(int index, std::byte value) {
    const auto lease = store_->fetch(block(index), Access::kRead);
    std::vector<std::byte> found(6000);
    device_.copy(found, lease->bytes(), *stream_);
    stream_->synchronize();
    EXPECT_EQ(found, std::vector<std::byte>(6000, value));
  }
  BlockId block(int index) const { return blocks_[static_cast<std::size_t>(index)]; }
  Bytes on_device() const { return device_.ledger()->held(memory::Tier::kDevice); }

  device::LateDevice device_;
  std::unique_ptr<device::Stream> stream_ = device_.create_stream();
  std::shared_ptr<StateStore> store_ = make_memory_store(memory::Tier::kHost, device_);
  std::vector<BlockId> blocks_;
};

TEST_F(CachedBlocks, LieOnTheDeviceUntilTheyAreDropped) {
  EXPECT_EQ(on_device(), 12'000_B);
  EXPECT_TRUE(store_->cached(block(0)) && store_->cached(block(1)));
  EXPECT_FALSE(store_->cached(block(2)));
  EXPECT_FALSE(device_.host_accessible(store_->fetch(block(1), Access::kRead)->bytes().data()));
  expect(1, std::byte{2});
  fill(1, std::byte{7});
  store_->drop_cached();
  EXPECT_EQ(on_device(), 0_B);
  EXPECT_TRUE(device_.host_accessible(store_->fetch(block(1), Access::kRead)->bytes().data()));
  expect(0, std::byte{1});
  expect(1, std::byte{7});
  expect(2, std::byte{3});
}

TEST_F(CachedBlocks, StayThereWhileTheyAreLeased) {
  {
    const auto lease = store_->fetch({block(0), Bytes(), 4096_B}, Access::kRead);
    store_->drop_cached();
    EXPECT_TRUE(store_->cached(block(0)));
    EXPECT_FALSE(store_->cached(block(1)));
    EXPECT_FALSE(store_->cache({&blocks_[0], 1}, *stream_));
  }
  store_->drop_cached();
  EXPECT_FALSE(store_->cached(block(0)));
  expect(0, std::byte{1});
}

TEST(MemoryStore, CachesAllBlocksOrNone) {
  device::LimitedDevice device(10'000_B);
  const auto stream = device.create_stream();
  for (const memory::Tier tier : {memory::Tier::kHost, memory::Tier::kDevice}) {
    const auto store = make_memory_store(tier, device);
    const BlockId blocks[] = {store->add("first", 4000_B, memory::Kind::kOptimizerState),
                              store->add("second", 4000_B, memory::Kind::kOptimizerState)};
    const auto others =
        device.allocate(tier == memory::Tier::kHost ? 3000_B : 1_B, memory::Kind::kStaging);
    EXPECT_FALSE(store->cache(blocks, *stream));
    EXPECT_FALSE(store->cached(blocks[0]));
    EXPECT_EQ(store->cache({blocks, 1}, *stream), tier == memory::Tier::kHost);
  }
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
