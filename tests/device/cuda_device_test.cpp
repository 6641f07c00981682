#include "strata/device/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/device_adam_conformance.h"
#include "device/device_conformance.h"
#include "device/device_kernels_conformance.h"
#include "kernels/references.h"

namespace strata::device {
namespace {

struct CudaHarness {
  static constexpr std::string_view kName = "cuda";
  static std::unique_ptr<Device> make() {
    if (cuda_device_count() == 0) return nullptr;
    return make_cuda_device({});
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceConformance, CudaHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceKernelsConformance, CudaHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceAdamConformance, CudaHarness);

TEST(CudaDevice, ADeviceThatIsNotThereIsAnErrorThatSaysWhatIsMissing) {
  try {
    make_cuda_device({.index = cuda_device_count()});
    FAIL() << "made a device that is not there";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::AnyOf(::testing::HasSubstr("no CUDA compiler"),
                                               ::testing::HasSubstr("driver"),
                                               ::testing::HasSubstr("CUDA_VISIBLE_DEVICES")));
  }
}

TEST(CudaDevice, MemoryMayOutliveTheDevice) {
  auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  const auto memory = device->allocate(100_B, memory::Kind::kWeights);
  const auto growable = device->reserve(100_B, memory::Kind::kWeights);
  const auto host = device->allocate_host(100_B, memory::Kind::kStaging);
  const auto stream = device->create_stream();
  device.reset();
  growable->grow_to(100_B);
  stream->synchronize();
}

TEST(CudaDevice, GrowableMemoryGoesBackToTheSystem) {
  const auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  expect_growable_memory_is_given_back(*device);
}

TEST(CudaDevice, DeviceMemoryIsNotTheHosts) {
  const auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  const auto memory = device->allocate(100_B, memory::Kind::kWeights);
  EXPECT_FALSE(device->host_accessible(memory->bytes().data()));
}

TEST(CudaDevice, SumsOfSquaresAreTheHostsToTheLastBit) {
  const auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  const auto stream = device->create_stream();
  std::vector<float> values(3'000'017);
  std::mt19937 random(21);
  std::normal_distribution<float> normal(0.0F, 1e-3F);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  const auto memory =
      device->allocate(Bytes(values.size() * sizeof(float)), memory::Kind::kGradients);
  device->copy(memory->bytes(), std::as_bytes(std::span(values)), *stream);
  const std::span<const float> there(reinterpret_cast<const float*>(memory->bytes().data()),
                                     values.size());
  const std::span<const float> all[] = {there};
  const auto sum = device->allocate(Bytes(sizeof(double)), memory::Kind::kStaging);
  device->sums_of_squares({reinterpret_cast<double*>(sum->bytes().data()), 1}, all, *stream);
  double got = 0.0;
  device->copy(std::as_writable_bytes(std::span(&got, 1)), sum->bytes(), *stream);
  stream->synchronize();
  EXPECT_EQ(got, kernels::sum_of_squares_reference(values));
}

// Another library of this process keeps nearly all of a device for reuse.
TEST(CudaDevice, WhatOthersKeepUnusedIsGivenBackBeforeADeviceIsFull) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no cuda device";
  constexpr Bytes kLeft = 256_MiB;
  const auto other = CudaHarness::make();
  std::unique_ptr<Memory> kept;
  int calls = 0;
  CudaDeviceOptions options;
  options.release_unused = [&] {
    ++calls;
    kept.reset();
  };
  const auto device = make_cuda_device(options);
  const auto fill = [&] { kept = other->allocate_uncharged(other->free_bytes() - kLeft); };
  fill();
  EXPECT_EQ(device->allocate(kLeft * 2, memory::Kind::kWeights)->bytes().size(),
            (kLeft * 2).size());
  EXPECT_EQ(calls, 1);
  fill();
  device->reserve(kLeft * 2, memory::Kind::kWeights)->grow_to(kLeft * 2);
  EXPECT_EQ(calls, 2);
  EXPECT_THROW(device->allocate(device->free_bytes() + kLeft, memory::Kind::kWeights),
               OutOfMemoryError);
  EXPECT_EQ(calls, 3);
}

TEST(CudaDevice, AGrowthBeyondTheDeviceLeavesWhatIsBacked) {
  const auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  const auto memory = device->reserve(device->free_bytes() + 1_GiB, memory::Kind::kWeights);
  memory->grow_to(32_MiB);
  EXPECT_THROW(memory->grow_to(memory->reserved()), OutOfMemoryError);
  EXPECT_EQ(memory->backed(), 32_MiB);
  EXPECT_EQ(device->ledger()->held(memory::Tier::kDevice), 32_MiB);
}

TEST(CudaDevice, AFullDeviceSaysWhatTheDriverHasLeft) {
  const auto device = CudaHarness::make();
  if (device == nullptr) GTEST_SKIP() << "this machine has no cuda device";
  try {
    const auto memory =
        device->allocate(device->free_bytes() + 64_MiB, memory::Kind::kMasterWeights);
    FAIL() << "got more than the device has";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the driver has"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("(master weights)"));
  }
}

}  // namespace
}  // namespace strata::device
