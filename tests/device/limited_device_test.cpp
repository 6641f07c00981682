#include "device/limited_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/device_conformance.h"

namespace strata::device {
namespace {

struct LimitedHarness {
  static constexpr std::string_view kName = "cpu";
  static std::unique_ptr<Device> make() { return std::make_unique<LimitedDevice>(1_GiB); }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Limited, DeviceConformance, LimitedHarness);

TEST(LimitedDevice, GivesOutItsLimitAndTakesBack) {
  LimitedDevice device(64_MiB);
  auto memory = device.allocate(20_MiB, memory::Kind::kWeights);
  const auto uncharged = device.allocate_uncharged(20_MiB);
  EXPECT_LE(device.free_bytes(), 24_MiB);
  EXPECT_THROW(device.allocate(25_MiB, memory::Kind::kWeights), OutOfMemoryError);
  EXPECT_THROW(device.allocate_uncharged(25_MiB), OutOfMemoryError);
  memory.reset();
  EXPECT_NO_THROW(device.allocate(25_MiB, memory::Kind::kWeights));
}

TEST(LimitedDevice, AGrowthBeyondItsLimitLeavesWhatIsBacked) {
  LimitedDevice device(64_MiB);
  const auto memory = device.reserve(1_GiB, memory::Kind::kWeights);
  memory->grow_to(32_MiB);
  EXPECT_THROW(memory->grow_to(512_MiB), OutOfMemoryError);
  EXPECT_EQ(memory->backed(), 32_MiB);
  EXPECT_EQ(device.ledger()->held(memory::Tier::kDevice), 32_MiB);
  memory->release();
  EXPECT_NO_THROW(memory->grow_to(64_MiB));
}

}  // namespace
}  // namespace strata::device
