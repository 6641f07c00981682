#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "strata/comm/host/rank_link.h"

namespace strata::comm {
namespace {

TEST(BufferDirectory, FindsLivingBuffersOnly) {
  auto directory = std::make_unique<BufferDirectory>();
  EXPECT_FALSE(directory->find(7));
  const auto slot = directory->insert(7, {4096, 100});
  ASSERT_TRUE(slot);
  directory->insert(8, {8192, 0});
  EXPECT_EQ(directory->find(7), (BufferRange{4096, 100}));
  const std::uint64_t before = directory->changes();
  directory->erase(*slot);
  EXPECT_NE(directory->changes(), before);
  EXPECT_FALSE(directory->find(7));
  EXPECT_EQ(directory->find(8), (BufferRange{8192, 0}));
}

TEST(BufferDirectory, UsesFreedSlotsAgainAndSaysWhenItIsFull) {
  auto directory = std::make_unique<BufferDirectory>();
  for (std::size_t i = 0; i < 100'000; ++i) {
    const auto slot = directory->insert(i + 1, {});
    ASSERT_TRUE(slot);
    directory->erase(*slot);
  }
  for (std::size_t i = 0; i < 3; ++i) ASSERT_EQ(directory->insert(i + 1, {}), i);
}

TEST(BufferDirectory, ReadersNeverSeeHalfAChange) {
  auto directory = std::make_unique<BufferDirectory>();
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (std::int64_t i = 1; i <= 20'000; ++i) directory->erase(*directory->insert(5, {i, -i}));
    stop = true;
  });
  while (!stop) {
    const auto place = directory->find(5);
    ASSERT_TRUE(!place || place->offset == -place->bytes);
  }
  owner.join();
}

}  // namespace
}  // namespace strata::comm
