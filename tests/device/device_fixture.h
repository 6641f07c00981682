// The fixture of the suite that every Device must pass (device_conformance.h): a device and a
// stream, bytes on their way to it and back, and contents to try it with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/kernels/elementwise.h"

namespace strata::device {

template <typename Harness>
class DeviceConformance : public ::testing::Test {
 protected:
  using Content = std::vector<std::byte>;

  std::unique_ptr<Memory> allocate(Bytes bytes) {
    return device_->allocate(bytes, memory::Kind::kWeights);
  }

  std::unique_ptr<Memory> upload(std::span<const std::byte> source) {
    auto memory = allocate(Bytes(source.size()));
    device_->copy(memory->bytes(), source, *stream_);
    stream_->synchronize();
    return memory;
  }

  Content download(std::span<const std::byte> source) {
    Content content(source.size());
    device_->copy(content, source, *stream_);
    stream_->synchronize();
    return content;
  }

  static Content random_bytes(Bytes size, std::uint32_t seed) {
    std::mt19937 random(seed);
    Content content(size.size());
    std::generate(content.begin(), content.end(), [&] { return static_cast<std::byte>(random()); });
    return content;
  }

  static std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    std::vector<float> values(count);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
  }

  // Ordinary values and those where conversions go wrong, in the type asked for.
  static Content floating_content(DType dtype, std::size_t count, std::uint32_t seed) {
    auto values = random_floats(count, seed);
    const std::vector<float> special = {0.0F,
                                        -0.0F,
                                        1e-8F,
                                        -6e-8F,
                                        65504.0F,
                                        65520.0F,
                                        1e30F,
                                        -3.4e38F,
                                        1e-42F,
                                        1.0009766F,
                                        std::numeric_limits<float>::infinity(),
                                        -std::numeric_limits<float>::infinity()};
    std::copy_n(special.begin(), std::min(count, special.size()), values.begin());
    Content content(bytes_of(Numel(count), dtype).size());
    kernels::cast(content.data(), dtype, reinterpret_cast<const std::byte*>(values.data()),
                  DType::kFloat32, Numel(count), nullptr);
    return content;
  }

  template <typename T>
  static std::span<const std::byte> raw(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
  }

  static std::span<float> floats(Memory& memory) {
    const auto bytes = memory.bytes();
    return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
  }

  std::vector<float> download_floats(Memory& memory) {
    const Content content = download(memory.bytes());
    std::vector<float> values(content.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), content.data(), content.size());
    return values;
  }

  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << "this machine has no " << Harness::kName << " device";
    stream_ = device_->create_stream();
  }

  std::unique_ptr<Device> device_ = Harness::make();
  std::unique_ptr<Stream> stream_;
};

inline constexpr DType kFloatingTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                           DType::kBFloat16};
inline constexpr DType kTrainingTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
// None, one, less and more than any vector, and more than a kernel gives to one thread.
inline constexpr std::size_t kCounts[] = {0, 1, 17, 1000, 300001};

// Memory that grows, private or shared, goes back to the system and is backed again where it was.
inline void expect_growable_memory_is_given_back(Device& device) {
  const auto stream = device.create_stream();
  for (const bool shared : {false, true}) {
    const auto memory = shared ? device.reserve_shared(8_MiB, memory::Kind::kWeights)
                               : device.reserve(8_MiB, memory::Kind::kWeights);
    std::byte* const base = memory->base();
    for (int round = 0; round < 2; ++round) {
      memory->grow_to(3_MiB);
      std::vector<std::byte> found(1000, std::byte{1});
      device.copy(found, {base, 1000}, *stream);
      stream->synchronize();
      EXPECT_EQ(found, std::vector<std::byte>(1000));
      std::ranges::fill(found, std::byte{7});
      device.copy({base, 1000}, found, *stream);
      stream->synchronize();
      memory->release();
      EXPECT_EQ(memory->base(), base);
      EXPECT_EQ(memory->backed(), 0_B);
      EXPECT_EQ(device.ledger()->held(memory::Tier::kDevice), 0_B);
    }
  }
}

}  // namespace strata::device
