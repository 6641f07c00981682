#include "strata/device/cpu_device.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "device/device_adam_conformance.h"
#include "device/device_conformance.h"
#include "device/device_kernels_conformance.h"

namespace strata::device {
namespace {

template <int kThreads>
struct CpuHarness {
  static constexpr std::string_view kName = "cpu";
  static std::unique_ptr<Device> make() {
    return std::make_unique<CpuDevice>(CpuDeviceOptions{.threads = kThreads});
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(CpuOneThread, DeviceConformance, CpuHarness<1>);
INSTANTIATE_TYPED_TEST_SUITE_P(CpuThreeThreads, DeviceConformance, CpuHarness<3>);
INSTANTIATE_TYPED_TEST_SUITE_P(CpuOneThread, DeviceKernelsConformance, CpuHarness<1>);
INSTANTIATE_TYPED_TEST_SUITE_P(CpuThreeThreads, DeviceKernelsConformance, CpuHarness<3>);
INSTANTIATE_TYPED_TEST_SUITE_P(CpuOneThread, DeviceAdamConformance, CpuHarness<1>);
INSTANTIATE_TYPED_TEST_SUITE_P(CpuThreeThreads, DeviceAdamConformance, CpuHarness<3>);

TEST(CpuDevice, MemoryMayOutliveTheDevice) {
  auto device = std::make_unique<CpuDevice>();
  const auto memory = device->allocate(100_B, memory::Kind::kWeights);
  const auto growable = device->reserve(100_B, memory::Kind::kWeights);
  device.reset();
  growable->grow_to(100_B);
  growable->base()[99] = memory->bytes()[99];
}

TEST(CpuDevice, GrowableMemoryGoesBackToTheSystem) {
  CpuDevice device;
  expect_growable_memory_is_given_back(device);
}

TEST(CpuDevice, ReservesMoreAddressesThanThereIsMemory) {
  CpuDevice device;
  const auto memory = device.reserve(Bytes(std::int64_t{1} << 40), memory::Kind::kWeights);
  memory->grow_to(1_MiB);
  EXPECT_EQ(memory->backed(), 1_MiB);
}

TEST(CpuDevice, ThreadsUseOneDeviceAtTheSameTime) {
  CpuDevice device({.threads = 2});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&device, t] {
      const auto stream = device.create_stream();
      for (int i = 0; i < 20; ++i) {
        const auto source = device.allocate(3_MiB, memory::Kind::kGathered);
        const auto target = device.allocate(3_MiB, memory::Kind::kGathered);
        device.fill_zero(source->bytes(), *stream);
        source->bytes().back() = static_cast<std::byte>(t);
        device.copy(target->bytes(), source->bytes(), *stream);
        EXPECT_EQ(target->bytes().back(), static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device.ledger()->held(memory::Tier::kDevice), 0_B);
}

}  // namespace
}  // namespace strata::device
