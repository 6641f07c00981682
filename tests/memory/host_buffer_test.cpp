#include "strata/memory/host_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"

namespace strata::memory {
namespace {

using ::testing::HasSubstr;

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::uintptr_t address_of(const HostBuffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

TEST(HostBuffer, IsZeroAndPageAlignedAtAnySize) {
  for (const Bytes size : {1_B, 4095_B, 4096_B, 4097_B, 300_KiB, 2_MiB, 5_MiB + 1_B}) {
    HostBuffer buffer(size);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(buffer.bytes().size(), size.size());
    EXPECT_EQ(address_of(buffer) % page_size().size(), 0U);
    EXPECT_TRUE(all_zero(buffer.bytes()));
    std::fill(buffer.bytes().begin(), buffer.bytes().end(), std::byte{0xff});
  }
}

TEST(HostBuffer, OfZeroBytesIsEmpty) {
  const auto ledger = std::make_shared<Ledger>();
  const HostBuffer buffer(0_B, {.ledger = ledger});
  EXPECT_TRUE(buffer.bytes().empty());
  EXPECT_EQ(ledger->held(Tier::kHost), 0_B);
}

TEST(HostBuffer, IsAlignedToHugePagesWhenItHoldsOne) {
  const HostBuffer buffer(3_MiB);
  EXPECT_EQ(address_of(buffer) % kHugePageSize.size(), 0U);
  const HostBuffer without(3_MiB, {.huge_pages = false});
  EXPECT_EQ(address_of(without) % page_size().size(), 0U);
}

TEST(HostBuffer, TouchedByThreadsIsStillZero) {
  ThreadPool pool(3);
  const HostBuffer buffer(50_MiB + 3_B, {.touch = &pool});
  EXPECT_TRUE(all_zero(buffer.bytes()));
}

TEST(HostBuffer, GivesBackThePagesThatLieWhollyInARange) {
  const Bytes page = page_size();
  HostBuffer buffer(page * 3, {.huge_pages = false});
  std::ranges::fill(buffer.bytes(), std::byte{7});
  give_back_pages(buffer.bytes().subspan(1));  // not the first page: its first byte is in use
  EXPECT_EQ(buffer.bytes()[0], std::byte{7});
  EXPECT_EQ(buffer.bytes()[page.size() - 1], std::byte{7});
  EXPECT_EQ(buffer.bytes()[page.size()], std::byte{0});
  EXPECT_EQ(buffer.bytes().back(), std::byte{0});
  give_back_pages(buffer.bytes().first(page.size() - 1));
  EXPECT_EQ(buffer.bytes()[0], std::byte{7});
  give_back_pages({});
}

TEST(HostBuffer, IsChargedTheBytesAskedForUntilItGoes) {
  const auto ledger = std::make_shared<Ledger>();
  HostBuffer buffer(1000_B, {.ledger = ledger, .tier = Tier::kDevice, .kind = Kind::kGathered});
  EXPECT_EQ(ledger->held(Tier::kDevice, Kind::kGathered), 1000_B);
  std::byte* const address = buffer.data();
  HostBuffer moved(std::move(buffer));
  EXPECT_EQ(moved.data(), address);
  EXPECT_EQ(ledger->held(Tier::kDevice), 1000_B);
  HostBuffer target(10_B, {.ledger = ledger});
  target = std::move(moved);
  EXPECT_EQ(ledger->held(Tier::kHost), 0_B);
  target = HostBuffer();
  EXPECT_EQ(ledger->held(Tier::kDevice), 0_B);
}

TEST(HostBuffer, ARefusalSaysWhatWasWantedAndWhatIsHeld) {
  const auto ledger = std::make_shared<Ledger>();
  const HostBuffer held(100_B, {.ledger = ledger, .kind = Kind::kMasterWeights});
  for (const Bytes size :
       {Bytes(std::int64_t{1} << 55), Bytes(std::numeric_limits<std::int64_t>::max())}) {
    try {
      const HostBuffer buffer(size, {.ledger = ledger, .kind = Kind::kOptimizerState});
      FAIL() << "no machine has that much";
    } catch (const OutOfMemoryError& error) {
      EXPECT_THAT(error.what(), HasSubstr("host tier (optimizer state)"));
      EXPECT_THAT(error.what(), HasSubstr(to_string(size) + " wanted"));
      EXPECT_THAT(error.what(), HasSubstr("master weights 100 B"));
    }
  }
  EXPECT_EQ(ledger->held(Tier::kHost), 100_B);
}

}  // namespace
}  // namespace strata::memory
