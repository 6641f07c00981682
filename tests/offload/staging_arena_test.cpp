#include "strata/offload/staging_arena.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/device/cpu_device.h"

namespace strata::offload {
namespace {

// Has extents, and gives one back whenever the arena asks for it.
class Hoard final : public StagingArena::Holder {
 public:
  explicit Hoard(StagingArena& arena, StagingArena::Effort effort = StagingArena::Effort::kNone,
                 std::size_t most = 1000)
      : arena_(arena), effort_(effort) {
    while (extents_.size() < most) {
      auto extent = arena_.try_take(4_KiB);
      if (!extent) break;
      extents_.push_back(std::move(*extent));
    }
    arena_.join(*this);
  }
  ~Hoard() override { arena_.leave(*this); }
  Hoard(const Hoard&) = delete;
  Hoard& operator=(const Hoard&) = delete;
  bool free_memory(StagingArena::Effort effort) override {
    if (effort != effort_ || extents_.empty()) return false;
    extents_.pop_back();
    return true;
  }
  std::size_t count() const { return extents_.size(); }

 private:
  StagingArena& arena_;
  const StagingArena::Effort effort_;
  std::vector<Extent> extents_;
};

TEST(StagingArena, HoldsItsBudgetInWholePagesAndNoMore) {
  device::CpuDevice device;
  {
    StagingArena arena(device, 20000_B);
    EXPECT_EQ(arena.budget(), 16384_B);
    EXPECT_EQ(device.ledger()->held(memory::Tier::kHost, memory::Kind::kStaging), 16384_B);
    const auto most = arena.try_take(16384_B);
    ASSERT_TRUE(most);
    EXPECT_EQ(most->bytes().data(), arena.memory().data());
    EXPECT_FALSE(arena.try_take(1_B));
  }
  EXPECT_EQ(device.ledger()->held(memory::Tier::kHost), 0_B);
  const auto message = testing::message_of<UsageError>([&] { StagingArena(device, 4095_B); });
  EXPECT_THAT(message, ::testing::HasSubstr("4.00 KiB"));
}

TEST(StagingArena, HoldersGiveWayUntilAllFitsAndNoFurther) {
  device::CpuDevice device;
  StagingArena arena(device, 64_KiB);
  Hoard hoard(arena);
  ASSERT_EQ(hoard.count(), 16U);
  const std::array sizes{4_KiB, 12_KiB, 8_KiB};
  const auto extents = arena.take_together(sizes);
  ASSERT_TRUE(extents);
  ASSERT_EQ(extents->size(), 3U);
  for (std::size_t i = 0; i < sizes.size(); ++i)
    EXPECT_EQ(Bytes((*extents)[i].bytes().size()), sizes[i]);
  EXPECT_EQ(hoard.count(), 10U);
}

TEST(StagingArena, WhatCannotFitEndsWithoutAndTakesNothing) {
  device::CpuDevice device;
  StagingArena arena(device, 64_KiB);
  const auto leased = arena.try_take(32_KiB);
  Hoard hoard(arena);
  EXPECT_FALSE(arena.take_together(std::array{16_KiB, 20_KiB}));
  EXPECT_EQ(hoard.count(), 0U);
  EXPECT_EQ(arena.in_use(), 32_KiB);
  EXPECT_TRUE(arena.take_together(std::array{16_KiB, 16_KiB}));
}

TEST(StagingArena, TheLeastEffortComesFirstAndWhoAsksBeforeOthers) {
  using enum StagingArena::Effort;
  device::CpuDevice device;
  StagingArena arena(device, 64_KiB);
  EXPECT_EQ(arena.lease_share(), 20_KiB);
  Hoard dear(arena, kReadAgain, 4);
  Hoard other(arena, kNone, 6);
  Hoard own(arena, kNone, 6);
  EXPECT_EQ(arena.lease_share(), 4_KiB);  // a third for three
  EXPECT_EQ(arena.ahead_share(), 21845_B);
  const auto spare = arena.take_spare(8_KiB, own);
  ASSERT_TRUE(spare);
  EXPECT_EQ(own.count(), 4U);
  EXPECT_FALSE(arena.take_spare(56_KiB, own));
  EXPECT_EQ(own.count(), 0U);
  EXPECT_EQ(other.count(), 0U);
  EXPECT_EQ(dear.count(), 4U);
  const std::array all{56_KiB};
  EXPECT_TRUE(arena.take_together(all, &own));
  EXPECT_EQ(dear.count(), 0U);
}

void fill(const Extent& extent, std::uint8_t value) {
  std::ranges::fill(extent.bytes(), std::byte{value});
}

bool holds(const Extent& extent, std::uint8_t value) {
  return std::ranges::all_of(extent.bytes(), [&](std::byte b) { return b == std::byte{value}; });
}

TEST(StagingArena, ExtentsKeepTheirContentsOverARandomHistory) {
  device::CpuDevice device;
  StagingArena arena(device, 2_MiB);
  std::mt19937 random(7);
  std::vector<std::pair<Extent, std::uint8_t>> held;
  for (int step = 0; step < 2000; ++step) {
    if (held.empty() || random() % 2 == 0) {
      auto extent = arena.try_take(Bytes(static_cast<std::int64_t>(random() % 90000)));
      if (!extent) continue;
      const auto value = static_cast<std::uint8_t>(random());
      fill(*extent, value);
      held.emplace_back(std::move(*extent), value);
    } else {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_TRUE(holds(held.back().first, held.back().second));
      held.pop_back();
    }
  }
  held.clear();
  EXPECT_EQ(arena.in_use(), 0_B);
  EXPECT_TRUE(arena.try_take(arena.budget()));
}

TEST(StagingArena, AnExtentIsGivenBackOnceAndMayGoAfterItsArena) {
  device::CpuDevice device;
  std::optional<StagingArena> arena(std::in_place, device, 16_KiB);
  Extent first = std::move(*arena->try_take(4_KiB));
  Extent second = std::move(*arena->try_take(4_KiB));
  second = std::move(first);
  EXPECT_EQ(arena->in_use(), 4_KiB);
  arena.reset();
}

}  // namespace
}  // namespace strata::offload
