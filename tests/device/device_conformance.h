// Every Device must pass this typed suite; device_kernels_conformance.h has the results that it
// must compute. A device joins by a harness type and one line:
//   INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, DeviceConformance, CpuHarness);
// The harness has
//   static constexpr std::string_view kName;        the value of name()
//   static std::unique_ptr<device::Device> make();  null: none here, skip
// The suite reaches device memory through Device::copy alone, so that the memory may lie anywhere.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "device/device_fixture.h"
#include "strata/base/error.h"
#include "strata/device/device.h"
#include "strata/memory/host_buffer.h"

namespace strata::device {

TYPED_TEST_SUITE_P(DeviceConformance);

// More than any machine has, or a process can address.
inline constexpr Bytes kBeyondAll = 1'000'000_GiB;

TYPED_TEST_P(DeviceConformance, SaysItsName) {
  EXPECT_EQ(this->device_->name(), TypeParam::kName);
  ASSERT_NE(this->device_->ledger(), nullptr);
}

TYPED_TEST_P(DeviceConformance, MemoryIsAlignedAndOfTheSizeAskedFor) {
  for (const Bytes size : {0_B, 1_B, 255_B, 4097_B, 3_MiB}) {
    const auto memory = this->allocate(size);
    EXPECT_EQ(memory->bytes().size(), size.size());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->bytes().data()) % 256, 0U);
  }
}

TYPED_TEST_P(DeviceConformance, MemoryIsChargedByKindUntilItGoes) {
  const auto& ledger = *this->device_->ledger();
  {
    const auto weights = this->device_->allocate(1000_B, memory::Kind::kWeights);
    const auto gathered = this->device_->allocate(300_B, memory::Kind::kGathered);
    EXPECT_EQ(ledger.held(memory::Tier::kDevice, memory::Kind::kWeights), 1000_B);
    EXPECT_EQ(ledger.held(memory::Tier::kDevice, memory::Kind::kGathered), 300_B);
  }
  EXPECT_EQ(ledger.held(memory::Tier::kDevice), 0_B);
}

TYPED_TEST_P(DeviceConformance, UnchargedMemoryIsLeftToItsUserToCharge) {
  const auto memory = this->device_->allocate_uncharged(40_MiB);
  EXPECT_EQ(memory->bytes().size(), (40_MiB).size());
  EXPECT_EQ(this->device_->ledger()->held(memory::Tier::kDevice), 0_B);
  EXPECT_THROW(this->device_->allocate_uncharged(kBeyondAll), OutOfMemoryError);
}

TYPED_TEST_P(DeviceConformance, HostMemoryIsTheHostsOwnAndIsReachedByCopiesAndKernels) {
  const auto values = this->random_floats(5000, 19);
  const auto host = this->device_->allocate_host(Bytes(20000), memory::Kind::kStaging);
  EXPECT_EQ(this->device_->ledger()->held(memory::Tier::kHost, memory::Kind::kStaging), 20000_B);
  EXPECT_TRUE(this->device_->host_accessible(host->bytes().data()));
  EXPECT_TRUE(std::ranges::all_of(host->bytes(), [](std::byte b) { return b == std::byte{0}; }));
  std::memcpy(host->bytes().data(), values.data(), 20000);
  const auto copied = this->allocate(20000_B);
  this->device_->copy(copied->bytes(), host->bytes(), *this->stream_);
  EXPECT_EQ(this->download_floats(*copied), values);
  EXPECT_EQ(this->device_->device_accessible(host->bytes().data()), host->pinned());
  if (!host->pinned()) return;
  const auto cast = this->allocate(40000_B);
  this->device_->cast(cast->bytes().data(), DType::kFloat64, host->bytes().data(), DType::kFloat32,
                      Numel(5000), *this->stream_);
  const auto wide = this->download(cast->bytes());
  for (std::size_t i = 0; i < values.size(); ++i) {
    double value = 0.0;
    std::memcpy(&value, wide.data() + i * sizeof value, sizeof value);
    ASSERT_EQ(value, static_cast<double>(values[i]));
  }
}

TYPED_TEST_P(DeviceConformance, HostMemoryThatIsExpectedIsGivenOnce) {
  const auto& ledger = *this->device_->ledger();
  const auto held = [&] { return ledger.held(memory::Tier::kHost, memory::Kind::kStaging); };
  this->device_->expect_host(30000_B, memory::Kind::kStaging);
  this->device_->expect_host(20000_B, memory::Kind::kStaging);
  auto host = this->device_->allocate_host(20000_B, memory::Kind::kStaging);
  EXPECT_EQ(host->bytes().size(), 20000U);
  EXPECT_EQ(held(), 20000_B);
  const auto next = this->device_->allocate_host(20000_B, memory::Kind::kStaging);
  EXPECT_NE(next->bytes().data(), host->bytes().data());
  host.reset();
  EXPECT_EQ(held(), 20000_B);
}

TYPED_TEST_P(DeviceConformance, HostMemoryThatWasExpectedInVainGoesWithTheDevice) {
  const std::shared_ptr<memory::Ledger> ledger = this->device_->ledger();
  this->device_->expect_host(20000_B, memory::Kind::kStaging);
  const auto other = this->device_->allocate_host(40000_B, memory::Kind::kStaging);
  EXPECT_EQ(other->bytes().size(), 40000U);
  this->stream_.reset();
  this->device_.reset();
  EXPECT_EQ(ledger->held(memory::Tier::kHost, memory::Kind::kStaging), 40000_B);
}

TYPED_TEST_P(DeviceConformance, OrdinaryHostMemoryIsTheHostsOwn) {
  const std::vector<std::byte> ordinary(100);
  EXPECT_TRUE(this->device_->host_accessible(ordinary.data()));
  const auto memory = this->allocate(100_B);
  EXPECT_TRUE(this->device_->device_accessible(memory->bytes().data()));
}

TYPED_TEST_P(DeviceConformance, TheComputeStreamIsOrderedWithOtherStreamsByEvents) {
  const auto content = this->random_bytes(1_MiB, 20);
  const auto source = this->upload(content);
  const auto target = this->allocate(1_MiB);
  Stream& compute = this->device_->compute_stream();
  this->device_->copy(target->bytes(), source->bytes(), compute);
  this->stream_->wait_for(*compute.record());
  EXPECT_EQ(this->download(target->bytes()), content);
}

TYPED_TEST_P(DeviceConformance, RunningOutSaysWhatWasWantedAndWhatIsHeld) {
  EXPECT_GT(this->device_->free_bytes(), 0_B);
  const auto held = this->device_->allocate(40_MiB, memory::Kind::kMasterWeights);
  try {
    this->device_->allocate(kBeyondAll, memory::Kind::kGathered);
    FAIL() << "beyond all memory";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("(gathered weights)"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr(to_string(kBeyondAll) + " wanted"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("master weights " + to_string(40_MiB)));
  }
  EXPECT_EQ(this->device_->ledger()->held(memory::Tier::kDevice), 40_MiB);
  EXPECT_NO_THROW(this->device_->allocate(16_MiB, memory::Kind::kGathered));
}

TYPED_TEST_P(DeviceConformance, CopiesBetweenHostAndDeviceInEveryDirection) {
  for (const Bytes size : {0_B, 1_B, 4097_B, 3_MiB + 5_B}) {
    const auto content = this->random_bytes(size, 1);
    const auto first = this->upload(content);
    const auto second = this->allocate(size);
    this->device_->copy(second->bytes(), first->bytes(), *this->stream_);
    EXPECT_EQ(this->download(second->bytes()), content);
  }
}

TYPED_TEST_P(DeviceConformance, ACopyTouchesNothingBesideItsTarget) {
  const auto content = this->random_bytes(1000_B, 2);
  const auto memory = this->upload(content);
  const auto part = this->random_bytes(100_B, 3);
  this->device_->copy(memory->bytes().subspan(333, 100), part, *this->stream_);
  this->device_->fill_zero(memory->bytes().subspan(700, 50), *this->stream_);
  auto expected = content;
  std::copy(part.begin(), part.end(), expected.begin() + 333);
  std::fill_n(expected.begin() + 700, 50, std::byte{0});
  EXPECT_EQ(this->download(memory->bytes()), expected);
}

TYPED_TEST_P(DeviceConformance, FillsWithZeroes) {
  const auto memory = this->upload(this->random_bytes(3_MiB + 5_B, 4));
  this->device_->fill_zero(memory->bytes(), *this->stream_);
  EXPECT_EQ(this->download(memory->bytes()), std::vector<std::byte>((3_MiB + 5_B).size()));
}

TYPED_TEST_P(DeviceConformance, WorkOfAStreamRunsInOrderAndAnEventOrdersAnother) {
  const auto other = this->device_->create_stream();
  const auto first = this->random_bytes(1_MiB, 13);
  const auto second = this->random_bytes(1_MiB, 14);
  const auto memory = this->upload(first);
  const auto target = this->allocate(1_MiB);
  this->device_->fill_zero(memory->bytes(), *this->stream_);
  this->device_->copy(memory->bytes(), second, *this->stream_);
  const auto written = this->stream_->record();
  other->wait_for(*written);
  this->device_->copy(target->bytes(), memory->bytes(), *other);
  const auto copied = other->record();
  copied->wait();
  EXPECT_TRUE(copied->done());
  EXPECT_TRUE(written->done());
  EXPECT_EQ(this->download(target->bytes()), second);
}

TYPED_TEST_P(DeviceConformance, WhatTheHostWaitsForIsCountedWhereTheDeviceRunsAhead) {
  const int each = this->device_->runs_ahead() ? 1 : 0;
  const std::int64_t before = this->device_->host_waits()->count();
  const auto event = this->stream_->record();
  this->device_->compute_stream().wait_for(*event);
  EXPECT_EQ(this->device_->host_waits()->count(), before);
  event->wait();
  this->stream_->record_timed()->wait();
  this->stream_->synchronize();
  EXPECT_EQ(this->device_->host_waits()->count(), before + 3 * each);
}

TYPED_TEST_P(DeviceConformance, AnEventMayOutliveItsStream) {
  auto stream = this->device_->create_stream();
  const auto event = stream->record();
  stream.reset();
  event->wait();
  EXPECT_TRUE(event->done());
}

TYPED_TEST_P(DeviceConformance, TimedEventsOrderStreamsAndTellHowFarApartTheyAre) {
  const auto other = this->device_->create_stream();
  const auto content = this->random_bytes(1_MiB, 23);
  const auto memory = this->allocate(1_MiB);
  const auto target = this->allocate(1_MiB);
  const auto first = this->stream_->record_timed();
  this->device_->copy(memory->bytes(), content, *this->stream_);
  const auto written = this->stream_->record_timed();
  other->wait_for(*written);
  this->device_->copy(target->bytes(), memory->bytes(), *other);
  const auto last = other->record_timed();
  last->wait();
  EXPECT_TRUE(first->done() && written->done() && last->done());
  EXPECT_EQ(this->download(target->bytes()), content);
  EXPECT_EQ(first->seconds_since(*first), 0.0);
  EXPECT_GE(written->seconds_since(*first), 0.0);
  EXPECT_GE(last->seconds_since(*written), 0.0);
  EXPECT_NEAR(last->seconds_since(*first),
              last->seconds_since(*written) + written->seconds_since(*first), 1e-5);
  EXPECT_LE(first->seconds_since(*last), 0.0);
}

TYPED_TEST_P(DeviceConformance, GrowableMemoryGrowsInPlaceAndNewMemoryIsZero) {
  const auto memory = this->device_->reserve(64_MiB, memory::Kind::kWeights);
  EXPECT_GE(memory->reserved(), 64_MiB);
  EXPECT_EQ(memory->backed(), 0_B);
  std::byte* const base = memory->base();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % 256, 0U);

  memory->grow_to(1000_B);
  EXPECT_GE(memory->backed(), 1000_B);
  const auto content = this->random_bytes(1000_B, 15);
  this->device_->copy({base, 1000}, content, *this->stream_);
  Bytes before = memory->backed();
  for (const Bytes size : {3_MiB, 40_MiB, 64_MiB}) {
    memory->grow_to(size);
    ASSERT_EQ(memory->base(), base);
    ASSERT_GE(memory->backed(), size);
    const std::span<std::byte> fresh(base + before.size(), (memory->backed() - before).size());
    ASSERT_EQ(this->download(fresh), std::vector<std::byte>(fresh.size()));
    before = memory->backed();
  }
  EXPECT_EQ(this->download({base, 1000}), content);
}

TYPED_TEST_P(DeviceConformance, GrowableMemoryChargesWhatIsBackedAndNeverShrinks) {
  const auto& ledger = *this->device_->ledger();
  auto memory = this->device_->reserve(64_MiB, memory::Kind::kWeights);
  EXPECT_EQ(ledger.held(memory::Tier::kDevice), 0_B);
  memory->grow_to(5_MiB);
  const Bytes backed = memory->backed();
  EXPECT_EQ(ledger.held(memory::Tier::kDevice, memory::Kind::kWeights), backed);
  memory->grow_to(1_B);
  memory->grow_to(0_B);
  EXPECT_EQ(memory->backed(), backed);
  memory.reset();
  EXPECT_EQ(ledger.held(memory::Tier::kDevice), 0_B);
}

TYPED_TEST_P(DeviceConformance, AGrowthThatFailsLeavesWhatIsBacked) {
  const auto memory = this->device_->reserve(64_MiB, memory::Kind::kWeights);
  memory->grow_to(32_MiB);
  const auto content = this->random_bytes(100_B, 16);
  this->device_->copy({memory->base(), 100}, content, *this->stream_);
  const Bytes backed = memory->backed();
  EXPECT_THROW(memory->grow_to(memory->reserved() + 1_B), UsageError);
  EXPECT_EQ(memory->backed(), backed);
  EXPECT_EQ(this->device_->ledger()->held(memory::Tier::kDevice), backed);
  EXPECT_EQ(this->download({memory->base(), 100}), content);
}

TYPED_TEST_P(DeviceConformance, SharedMemoryIsReadThroughItsMappingWhileItGrows) {
  const auto memory = this->device_->reserve_shared(64_MiB, memory::Kind::kWeights);
  const auto mapping = this->device_->reserve_mapping(memory->reserved());
  for (const Bytes size : {3_MiB, 40_MiB}) {
    memory->grow_to(size);
    while (mapping->pieces() < memory->pieces()) mapping->add(memory->piece(mapping->pieces()));
    EXPECT_EQ(mapping->mapped(), memory->backed());
    const auto content = this->random_bytes(size, 31);
    this->device_->copy({memory->base(), size.size()}, content, *this->stream_);
    this->stream_->synchronize();
    EXPECT_EQ(this->download({mapping->base(), size.size()}), content);
  }
}

TYPED_TEST_P(DeviceConformance, AMappingOutlivesTheSharedMemory) {
  auto memory = this->device_->reserve_shared(1_MiB, memory::Kind::kWeights);
  memory->grow_to(1_MiB);
  const auto content = this->random_bytes(1_MiB, 32);
  this->device_->copy({memory->base(), content.size()}, content, *this->stream_);
  this->stream_->synchronize();
  const auto mapping = this->device_->reserve_mapping(1_MiB);
  mapping->add(memory->piece(0));
  memory.reset();
  EXPECT_EQ(this->device_->ledger()->held(memory::Tier::kDevice), 0_B);
  EXPECT_EQ(this->download({mapping->base(), content.size()}), content);
}

TYPED_TEST_P(DeviceConformance, AStreamWaitsForAFlagThatTheHostOrAnotherStreamWrites) {
  const memory::HostBuffer page(4_KiB);
  auto* const flags = reinterpret_cast<Flag*>(const_cast<std::byte*>(page.data()));
  const auto pinned = this->device_->pin({reinterpret_cast<std::byte*>(flags), page.size().size()});
  const auto other = this->device_->create_stream();
  const auto source = this->upload(this->random_bytes(1_MiB, 33));
  const auto target = this->allocate(1_MiB);
  std::thread writer([&] {
    this->device_->copy(target->bytes(), source->bytes(), *other);
    this->device_->write_flag(flags[3], 7, *other);
  });
  this->device_->wait_flag(flags[3], 6, *this->stream_);
  EXPECT_EQ(this->download(target->bytes()), this->download(source->bytes()));
  writer.join();
  EXPECT_EQ(flags[3].load(), 7U);
  // Counts may wrap around.
  flags[4].store(2);
  this->device_->wait_flag(flags[4], 0xFFFFFFF0U, *this->stream_);
  this->stream_->synchronize();
}

REGISTER_TYPED_TEST_SUITE_P(
    DeviceConformance, SharedMemoryIsReadThroughItsMappingWhileItGrows,
    WhatTheHostWaitsForIsCountedWhereTheDeviceRunsAhead, AMappingOutlivesTheSharedMemory,
    AStreamWaitsForAFlagThatTheHostOrAnotherStreamWrites, SaysItsName,
    MemoryIsAlignedAndOfTheSizeAskedFor, MemoryIsChargedByKindUntilItGoes,
    UnchargedMemoryIsLeftToItsUserToCharge, HostMemoryIsTheHostsOwnAndIsReachedByCopiesAndKernels,
    HostMemoryThatIsExpectedIsGivenOnce, HostMemoryThatWasExpectedInVainGoesWithTheDevice,
    OrdinaryHostMemoryIsTheHostsOwn, TheComputeStreamIsOrderedWithOtherStreamsByEvents,
    RunningOutSaysWhatWasWantedAndWhatIsHeld, CopiesBetweenHostAndDeviceInEveryDirection,
    ACopyTouchesNothingBesideItsTarget, FillsWithZeroes,
    WorkOfAStreamRunsInOrderAndAnEventOrdersAnother, AnEventMayOutliveItsStream,
    TimedEventsOrderStreamsAndTellHowFarApartTheyAre, GrowableMemoryGrowsInPlaceAndNewMemoryIsZero,
    GrowableMemoryChargesWhatIsBackedAndNeverShrinks, AGrowthThatFailsLeavesWhatIsBacked);

}  // namespace strata::device
