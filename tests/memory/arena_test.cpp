#include "strata/memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::memory {
namespace {

void fill(const Extent& extent, std::uint8_t value) {
  std::fill(extent.bytes().begin(), extent.bytes().end(), std::byte{value});
}

bool holds(const Extent& extent, std::uint8_t value) {
  return std::all_of(extent.bytes().begin(), extent.bytes().end(),
                     [&](std::byte b) { return b == std::byte{value}; });
}

TEST(Arena, ExtentsKeepTheirContentsOverARandomHistory) {
  HostBuffer memory(256_KiB);
  Arena arena(memory.bytes());
  std::mt19937 random(7);
  std::vector<std::pair<Extent, std::uint8_t>> held;
  for (int step = 0; step < 5000; ++step) {
    if (held.empty() || random() % 2 == 0) {
      auto extent = arena.try_allocate(Bytes(static_cast<std::int64_t>(random() % 9000)));
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
  EXPECT_TRUE(arena.try_allocate(arena.capacity()));
}

TEST(Arena, WhatDoesNotFitIsRefusedAndFitsLater) {
  HostBuffer memory(4_KiB);
  Arena arena(memory.bytes());
  auto whole = arena.try_allocate(4_KiB);
  ASSERT_TRUE(whole);
  EXPECT_FALSE(arena.try_allocate(1_B));
  whole.reset();
  EXPECT_TRUE(arena.try_allocate(4_KiB));
}

TEST(Arena, AnExtentIsGivenBackOnceAndMayOutliveItsArena) {
  HostBuffer memory(4_KiB);
  std::optional<Arena> arena(std::in_place, memory.bytes());
  Extent first = std::move(*arena->try_allocate(1_KiB));
  Extent second = std::move(*arena->try_allocate(1_KiB));
  second = std::move(first);
  EXPECT_EQ(arena->in_use(), 1_KiB);
  arena.reset();
  fill(second, 1);
}

TEST(Arena, ThreadsTakeAndGiveBackAtTheSameTime) {
  HostBuffer memory(1_MiB);
  Arena arena(memory.bytes());
  std::vector<std::thread> threads;
  for (std::uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 500; ++i) {
        const auto extent = arena.try_allocate(Bytes(static_cast<std::int64_t>(random() % 5000)));
        if (!extent) continue;
        fill(*extent, t);
        EXPECT_TRUE(holds(*extent, t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(arena.try_allocate(arena.capacity()));
}

}  // namespace
}  // namespace strata::memory
