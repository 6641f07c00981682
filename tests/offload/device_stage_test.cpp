#include "strata/offload/device_stage.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "device/late_device.h"
#include "device/losable_device.h"
#include "strata/base/error.h"
#include "strata/offload/make_store.h"

namespace strata::offload {
namespace {

constexpr Bytes kLargest = 8_KiB;

struct DeviceStageTest : ::testing::Test {
  // Values of the block, after all that was queued.
  std::vector<std::uint8_t> content() {
    device.compute_stream().synchronize();
    const auto lease = store->fetch(block, Access::kRead);
    const auto* const values = reinterpret_cast<const std::uint8_t*>(lease->bytes().data());
    return {values, values + lease->bytes().size()};
  }
  void add_to(std::span<std::byte> bytes, int value) {
    device.enqueue(device.compute_stream(), [bytes, value] {
      for (std::byte& each : bytes) each = static_cast<std::byte>(static_cast<int>(each) + value);
    });
  }

  device::LateDevice device;
  std::unique_ptr<StateStore> store = make_memory_store(memory::Tier::kHost, device);
  BlockId block = store->add("block", 64_KiB, memory::Kind::kOptimizerState);
  LinkWatch watch;
  DeviceStage stage{device, kLargest, watch};
};

TEST_F(DeviceStageTest, IsOneRingInMemoryOfTheDevice) {
  const Bytes held = device.ledger()->held(memory::Tier::kDevice, memory::Kind::kStaging);
  EXPECT_EQ(stage.share(), kLargest);
  EXPECT_GE(held, kLargest * 3);
  EXPECT_EQ(DeviceStage(device, 1_GiB, watch).share(), 16_MiB);
}

// Far more than the ring holds, in pieces of any size, each changed several times.
TEST_F(DeviceStageTest, BringsAndTakesBackInTheOrderOfTheKernels) {
  std::mt19937 random(7);
  std::vector<std::uint8_t> expected(64 * 1024);
  for (int round = 0; round < 10; ++round) {
    stage.begin();
    for (Bytes begin; begin < 64_KiB;) {
      const Bytes bytes = std::min(4_KiB * (1 + static_cast<int>(random() % 2)), 64_KiB - begin);
      const auto lease = store->fetch(Part{block, begin, begin + bytes}, Access::kReadWrite);
      const std::size_t half = bytes.size() / 2 - random() % 100;
      const auto first = stage.bring(*lease, lease->bytes().first(half), Access::kReadWrite);
      const auto rest = stage.bring(*lease, lease->bytes().subspan(half), Access::kReadWrite);
      EXPECT_FALSE(device.host_accessible(first->bytes().data()));
      add_to(first->bytes(), round);
      add_to(rest->bytes(), round + 1);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        expected[begin.size() + i] += static_cast<std::uint8_t>(round + (i < half ? 0 : 1));
      begin += bytes;
    }
    stage.join();
  }
  EXPECT_EQ(content(), expected);
}

TEST_F(DeviceStageTest, SeesWhatTheComputeStreamDidBeforeItsBeginning) {
  const auto lease = store->fetch(Part{block, 0_B, 4_KiB}, Access::kReadWrite);
  for (int i = 0; i < 20; ++i) {
    add_to(lease->bytes(), 1);
    stage.begin();
    {
      const auto copy = stage.bring(*lease, lease->bytes(), Access::kReadWrite);
      add_to(copy->bytes(), 1);
    }
    stage.join();
  }
  device.compute_stream().synchronize();
  EXPECT_EQ(lease->bytes().front(), std::byte{40});
  EXPECT_EQ(lease->bytes().back(), std::byte{40});
}

TEST_F(DeviceStageTest, TakesNothingBackThatWasOnlyRead) {
  const auto lease = store->fetch(Part{block, 0_B, 4_KiB}, Access::kReadWrite);
  stage.begin();
  {
    const auto copy = stage.bring(*lease, lease->bytes(), Access::kRead);
    const auto other = stage.bring(std::span<const std::byte>(lease->bytes()));
    add_to(copy->bytes(), 1);
    add_to(other->bytes(), 1);
  }
  stage.join();
  device.compute_stream().synchronize();
  EXPECT_EQ(lease->bytes().front(), std::byte{0});
}

// The device is lost, as after a fault of a GPU, while copies are held and others are on their way
// back.
TEST(LostDevice, EndsItsStageAndTheCopiesWithoutEndingTheProcess) {
  device::LosableDevice device;
  const auto store = make_memory_store(memory::Tier::kHost, device);
  const BlockId block = store->add("block", 64_KiB, memory::Kind::kOptimizerState);
  const auto lease = store->fetch(Part{block, 0_B, 4_KiB}, Access::kReadWrite);
  {
    LinkWatch watch;
    DeviceStage stage(device, kLargest, watch);
    stage.begin();
    const auto held = stage.bring(*lease, lease->bytes(), Access::kRead);
    stage.bring(*lease, lease->bytes(), Access::kReadWrite).reset();
    device.lose(true);
    EXPECT_THROW(stage.join(), DeviceError);
  }
}

}  // namespace
}  // namespace strata::offload
