// A store of several tiers: blocks that are added together all have room, or none of them is added.
#include <gtest/gtest.h>

#include "offload/store_harness.h"
#include "strata/base/error.h"
#include "strata/offload/make_store.h"

namespace strata::offload {
namespace {

class TieredStoreTest : public ::testing::Test {
 protected:
  std::vector<BlockId> add(Bytes on_device, Bytes on_host) {
    return store_->add_all({{"masters", on_device, kKind, memory::Tier::kDevice},
                            {"moments", on_host, kKind, memory::Tier::kHost},
                            {"more", on_device, kKind, memory::Tier::kDevice}});
  }
  Bytes held(memory::Tier tier) { return device_.ledger()->held(tier, kKind); }

  static constexpr memory::Kind kKind = memory::Kind::kOptimizerState;
  OnSmallHost<device::CpuDevice, 10000> device_;
  std::shared_ptr<StateStore> store_ =
      make_tiered_store({make_memory_store(memory::Tier::kDevice, device_),
                         make_memory_store(memory::Tier::kHost, device_)});
};

TEST_F(TieredStoreTest, NothingIsLeftWhereTheSecondTierHasNoRoom) {
  EXPECT_THROW(add(4096_B, 20000_B), OutOfMemoryError);
  EXPECT_EQ(held(memory::Tier::kDevice), 0_B);
  EXPECT_EQ(held(memory::Tier::kHost), 0_B);
  const std::vector<BlockId> blocks = add(4096_B, 8192_B);
  EXPECT_EQ(blocks, (std::vector<BlockId>{0, 1, 2}));
  EXPECT_EQ(store_->size_of(blocks[1]), 8192_B);
  EXPECT_EQ(held(memory::Tier::kDevice), 8192_B);
  EXPECT_THROW(add(4096_B, 4096_B), OutOfMemoryError);
  EXPECT_EQ(held(memory::Tier::kDevice), 8192_B);
  EXPECT_EQ(store_->fetch(blocks[2], Access::kRead)->bytes().size(), 4096U);
}

TEST_F(TieredStoreTest, TakesBackFromEveryTier) {
  const std::vector<BlockId> stay = add(64_B, 64_B);
  store_->take_back(add(4096_B, 4096_B));
  EXPECT_EQ(held(memory::Tier::kDevice), 128_B);
  EXPECT_EQ(held(memory::Tier::kHost), 64_B);
  EXPECT_EQ(add(128_B, 128_B), (std::vector<BlockId>{3, 4, 5}));
  EXPECT_EQ(store_->size_of(stay[1]), 64_B);
}

}  // namespace
}  // namespace strata::offload
