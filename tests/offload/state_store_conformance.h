// What every StateStore must do, as a typed suite. A store joins by a harness type and one line:
//   INSTANTIATE_TYPED_TEST_SUITE_P(OnHost, StateStoreConformance, HostHarness);
// The harness is default-constructible and has
//   static constexpr memory::Tier kTier;         the tier the store says it is
//   static constexpr Bytes kRoom;                 what fits into a store made by make()
//   std::unique_ptr<StateStore> make();           a new, empty store
//   Bytes charged(memory::Kind) const;            what the store charges to its tier
//   void write(std::span<std::byte> target, std::span<const std::byte> source);   into a lease
//   void read(std::span<std::byte> target, std::span<const std::byte> source);    out of a lease
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

template <typename Harness>
class StateStoreConformance : public ::testing::Test {
 protected:
  using Content = std::vector<std::byte>;

  static Content random_content(Bytes size, std::uint32_t seed) {
    std::mt19937 random(seed);
    Content content(size.size());
    std::generate(content.begin(), content.end(), [&] { return static_cast<std::byte>(random()); });
    return content;
  }

  void write(BlockId block, const Content& content) {
    const auto lease = store_->fetch(block, Access::kReadWrite);
    ASSERT_EQ(lease->bytes().size(), content.size());
    harness_.write(lease->bytes(), content);
  }

  Content read(BlockId block) {
    const auto lease = store_->fetch(block, Access::kRead);
    Content content(lease->bytes().size());
    harness_.read(content, lease->bytes());
    return content;
  }

  BlockId add(const std::string& name, Bytes bytes) {
    return store_->add(name, bytes, memory::Kind::kOptimizerState);
  }

  Harness harness_;
  std::unique_ptr<StateStore> store_ = harness_.make();
};

TYPED_TEST_SUITE_P(StateStoreConformance);

TYPED_TEST_P(StateStoreConformance, SaysItsTier) {
  EXPECT_EQ(this->store_->tier(), TypeParam::kTier);
}

TYPED_TEST_P(StateStoreConformance, ABlockBeginsAsZeroesOfItsSize) {
  for (const Bytes size : {0_B, 1_B, 4096_B, 10001_B}) {
    const BlockId block = this->add("block of " + to_string(size), size);
    EXPECT_EQ(this->store_->size_of(block), size);
    EXPECT_EQ(this->read(block), std::vector<std::byte>(size.size()));
  }
}

TYPED_TEST_P(StateStoreConformance, BlocksThatComeTogetherAreBlocksLikeOthers) {
  const auto kinds = {memory::Kind::kMasterWeights, memory::Kind::kOptimizerState};
  this->add("before", 100_B);
  std::vector<BlockSpec> specs;
  for (int i = 0; i < 4; ++i) {
    for (const memory::Kind kind : kinds)
      specs.push_back({"block " + std::to_string(i), Bytes(i * 1001), kind});
  }
  const std::vector<BlockId> blocks = this->store_->add_all(specs);
  ASSERT_EQ(blocks.size(), specs.size());
  std::vector<std::unique_ptr<Lease>> leases;
  std::vector<std::vector<std::byte>> contents;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(this->read(blocks[i]), std::vector<std::byte>(specs[i].bytes.size()));
    leases.push_back(this->store_->fetch(blocks[i], Access::kReadWrite));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(leases[i]->bytes().data()) % 64, 0U);
    contents.push_back(this->random_content(specs[i].bytes, static_cast<std::uint32_t>(i)));
    this->harness_.write(leases[i]->bytes(), contents[i]);
  }
  leases.clear();
  for (std::size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(this->read(blocks[i]), contents[i]);
  EXPECT_TRUE(this->store_->add_all({}).empty());
  for (const memory::Kind kind : kinds) EXPECT_GE(this->harness_.charged(kind), 6006_B);
}

TYPED_TEST_P(StateStoreConformance, OfBlocksThatDoNotFitTogetherNoneIsThere) {
  const Bytes half = TypeParam::kRoom - 1000_B;
  EXPECT_THROW(this->store_->add_all({{"one", half, memory::Kind::kMasterWeights},
                                      {"other", half, memory::Kind::kOptimizerState}}),
               OutOfMemoryError);
  EXPECT_EQ(this->harness_.charged(memory::Kind::kMasterWeights), 0_B);
  EXPECT_THROW(this->store_->size_of(0), UsageError);
  EXPECT_EQ(this->store_->size_of(this->add("fits", half)), half);
}

TYPED_TEST_P(StateStoreConformance, ALeaseIsAlignedTo64Bytes) {
  for (int i = 1; i < 6; ++i) {
    const BlockId block = this->add("block", Bytes(i * 7));
    const auto lease = this->store_->fetch(block, Access::kReadWrite);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease->bytes().data()) % 64, 0U);
  }
}

TYPED_TEST_P(StateStoreConformance, WhatWasWrittenSurvivesManyFetchesInAnyOrder) {
  std::mt19937 random(3);
  std::vector<BlockId> blocks;
  std::vector<std::vector<std::byte>> expected;
  for (int i = 0; i < 12; ++i) {
    const Bytes size(i * 1237);
    blocks.push_back(this->add("block " + std::to_string(i), size));
    expected.emplace_back(size.size());
  }
  for (std::uint32_t step = 0; step < 300; ++step) {
    const std::size_t i = random() % blocks.size();
    if (random() % 2 == 0) {
      expected[i] = this->random_content(this->store_->size_of(blocks[i]), step);
      this->write(blocks[i], expected[i]);
    } else {
      ASSERT_EQ(this->read(blocks[i]), expected[i]) << "block " << i << ", step " << step;
    }
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) EXPECT_EQ(this->read(blocks[i]), expected[i]);
}

TYPED_TEST_P(StateStoreConformance, SeveralBlocksAreLeasedTogether) {
  const BlockId first = this->add("master", 4000_B);
  const BlockId second = this->add("exp_avg", 4000_B);
  const auto one = this->random_content(4000_B, 1);
  const auto two = this->random_content(4000_B, 2);
  {
    const auto first_lease = this->store_->fetch(first, Access::kReadWrite);
    const auto second_lease = this->store_->fetch(second, Access::kReadWrite);
    this->harness_.write(first_lease->bytes(), one);
    this->harness_.write(second_lease->bytes(), two);
  }
  EXPECT_EQ(this->read(first), one);
  EXPECT_EQ(this->read(second), two);
}

TYPED_TEST_P(StateStoreConformance, ASecondLeaseOfABlockIsRefusedByName) {
  const BlockId block = this->add("layers.3.exp_avg", 100_B);
  auto lease = this->store_->fetch(block, Access::kRead);
  try {
    this->store_->fetch(block, Access::kRead);
    FAIL() << "leased twice";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("layers.3.exp_avg"));
  }
  lease.reset();
  EXPECT_NO_THROW(this->store_->fetch(block, Access::kRead));
}

TYPED_TEST_P(StateStoreConformance, AnUnknownBlockIsAnError) {
  this->add("block", 100_B);
  for (const BlockId block : {-1, 1, 1 << 30}) {
    EXPECT_THROW(this->store_->fetch(block, Access::kRead), UsageError);
    EXPECT_THROW(this->store_->size_of(block), UsageError);
  }
}

TYPED_TEST_P(StateStoreConformance, RunningOutAtAddLeavesTheEarlierBlocksAsTheyWere) {
  const BlockId block = this->add("kept", 1000_B);
  const auto content = this->random_content(1000_B, 9);
  this->write(block, content);
  const Bytes charged = this->harness_.charged(memory::Kind::kOptimizerState);
  try {
    this->add("too large", TypeParam::kRoom + 1_B);
    FAIL() << "nothing that large fits";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(to_string(TypeParam::kRoom + 1_B) + " wanted"));
  }
  EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), charged);
  EXPECT_EQ(this->read(block), content);
  const BlockId next = this->add("fits", 500_B);
  EXPECT_EQ(this->read(next), std::vector<std::byte>(500));
}

TYPED_TEST_P(StateStoreConformance, ChargesItsTierByKindUntilItGoes) {
  this->store_->add("master", 1000_B, memory::Kind::kMasterWeights);
  this->store_->add("exp_avg", 300_B, memory::Kind::kOptimizerState);
  this->store_->add("exp_avg_sq", 300_B, memory::Kind::kOptimizerState);
  EXPECT_EQ(this->harness_.charged(memory::Kind::kMasterWeights), 1000_B);
  EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), 600_B);
  this->store_.reset();
  EXPECT_EQ(this->harness_.charged(memory::Kind::kMasterWeights), 0_B);
  EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), 0_B);
}

REGISTER_TYPED_TEST_SUITE_P(StateStoreConformance, SaysItsTier, ABlockBeginsAsZeroesOfItsSize,
                            BlocksThatComeTogetherAreBlocksLikeOthers,
                            OfBlocksThatDoNotFitTogetherNoneIsThere, ALeaseIsAlignedTo64Bytes,
                            WhatWasWrittenSurvivesManyFetchesInAnyOrder,
                            SeveralBlocksAreLeasedTogether, ASecondLeaseOfABlockIsRefusedByName,
                            AnUnknownBlockIsAnError,
                            RunningOutAtAddLeavesTheEarlierBlocksAsTheyWere,
                            ChargesItsTierByKindUntilItGoes);

}  // namespace strata::offload
