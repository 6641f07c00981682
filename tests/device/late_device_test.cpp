#include "device/late_device.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "device/device_adam_conformance.h"
#include "device/device_conformance.h"
#include "device/device_kernels_conformance.h"

namespace strata::device {
namespace {

struct LateHarness {
  static constexpr std::string_view kName = "cpu";
  static std::unique_ptr<Device> make() { return std::make_unique<LateDevice>(); }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Late, DeviceConformance, LateHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(Late, DeviceKernelsConformance, LateHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(Late, DeviceAdamConformance, LateHarness);

// Two numbers on a device, and a flag for which its streams wait: work queued after that wait has
// not run.
struct Held {
  LateDevice device;
  std::unique_ptr<Memory> memory =
      device.allocate(Bytes(2 * sizeof(float)), memory::Kind::kStaging);
  std::unique_ptr<HostMemory> flags = device.allocate_host(64_B, memory::Kind::kStaging);
  Stream& compute = device.compute_stream();
  std::unique_ptr<Stream> other = device.create_stream();

  std::span<std::byte> number(std::size_t index) {
    return memory->bytes().subspan(index * sizeof(float), sizeof(float));
  }
  Flag& flag() { return *reinterpret_cast<Flag*>(flags->bytes().data()); }
  void hold(Stream& stream) { device.wait_flag(flag(), 1, stream); }
  void let_go() { flag().store(1); }
  float value(std::size_t index) {
    float result = 0.0F;
    device.copy(std::as_writable_bytes(std::span(&result, 1)), number(index), compute);
    return result;
  }
  void set(std::size_t index, float value, Stream& stream) {
    device.copy(number(index), std::as_bytes(std::span(&value, 1)), stream);
  }
};

TEST(LateDevice, GoesOnWithoutWhatAStreamHasYetToDo) {
  Held held;
  held.set(0, 1.0F, *held.other);
  held.other->synchronize();
  held.hold(*held.other);
  held.set(0, 2.0F, *held.other);
  const auto end = held.other->record();
  EXPECT_FALSE(end->done());
  EXPECT_EQ(held.value(0), 1.0F);
  held.let_go();
  end->wait();
  EXPECT_EQ(held.value(0), 2.0F);
}

TEST(LateDevice, OrdersStreamsByEventsAlone) {
  Held held;
  held.hold(*held.other);
  held.set(0, 3.0F, *held.other);
  held.set(1, 4.0F, held.compute);
  EXPECT_EQ(held.value(1), 4.0F);
  held.compute.wait_for(*held.other->record());
  held.device.copy(held.number(1), held.number(0), held.compute);
  held.let_go();
  EXPECT_EQ(held.value(1), 3.0F);
}

TEST(LateDevice, HasReadOrdinaryMemoryWhenACopyReturnsAndNotWhatKernelsRead) {
  Held held;
  auto pinned = held.device.allocate_host(4_B, memory::Kind::kStaging);
  auto* const there = reinterpret_cast<float*>(pinned->bytes().data());
  float here = 5.0F;
  *there = 5.0F;
  held.hold(held.compute);
  held.device.copy(held.number(0), std::as_bytes(std::span(&here, 1)), held.compute);
  held.device.copy(held.number(1), pinned->bytes(), held.compute);
  here = *there = 6.0F;
  held.let_go();
  EXPECT_EQ(held.value(0), 5.0F);
  EXPECT_EQ(held.value(1), 6.0F);
}

TEST(LateDevice, RunsATestsOwnWorkInTheOrderOfItsStream) {
  Held held;
  auto* const numbers = reinterpret_cast<float*>(held.memory->bytes().data());
  held.hold(held.compute);
  held.set(0, 7.0F, held.compute);
  held.device.enqueue(held.compute, [numbers] { numbers[1] = 2.0F * numbers[0]; });
  held.let_go();
  EXPECT_EQ(held.value(1), 14.0F);
}

TEST(LateDevice, RefusesKernelsOverOrdinaryMemory) {
  LateDevice device;
  std::array<float, 4> here{};
  const auto there = device.allocate(16_B, memory::Kind::kStaging);
  const std::span<float> memory(reinterpret_cast<float*>(there->bytes().data()), 4);
  const auto scale = [&](std::span<float> target, std::span<const float> source) {
    const std::byte* const sources[] = {std::as_bytes(source).data()};
    device.sum_in_order(target, sources, DType::kFloat32, 1.0F, false, device.compute_stream());
  };
  EXPECT_THROW(scale(here, memory), DeviceError);
  EXPECT_THROW(scale(memory, here), DeviceError);
  EXPECT_FALSE(device.host_accessible(there->bytes().data()));
}

TEST(LateDevice, LeavesTheWorkOfAStreamThatIsGoneToBeDone) {
  Held held;
  held.hold(*held.other);
  held.set(0, 8.0F, *held.other);
  const auto end = held.other->record();
  held.other.reset();
  EXPECT_FALSE(end->done());
  held.let_go();
  end->wait();
  EXPECT_EQ(held.value(0), 8.0F);
}

TEST(LateDevice, MemoryStreamsAndEventsMayOutliveTheDevice) {
  auto device = std::make_unique<LateDevice>();
  const auto memory = device->allocate(4_B, memory::Kind::kStaging);
  const auto stream = device->create_stream();
  device->fill_zero(memory->bytes(), *stream);
  const auto end = stream->record();
  device.reset();
  end->wait();
  EXPECT_EQ(memory->bytes()[3], std::byte{0});
}

}  // namespace
}  // namespace strata::device
