// Every StateStore must pass this typed suite. A store joins by a harness type and one line:
//   INSTANTIATE_TYPED_TEST_SUITE_P(OnHost, StateStoreConformance, HostHarness);
// The harness is default-constructible and has
//   static constexpr memory::Tier kTier;         the tier the store says it is
//   static constexpr Bytes kRoom;                 what fits into a store made by make()
//   std::unique_ptr<StateStore> make();           a new, empty store
//   Bytes charged(memory::Kind) const;            what the store charges to its tier
//   void write(std::span<std::byte> target, std::span<const std::byte> source);   into a lease
//   void read(std::span<std::byte> target, std::span<const std::byte> source);    out of a lease
//   void finish();                                waits for what these have queued
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

template <typename Harness>
class StateStoreConformance : public ::testing::Test {
 protected:
  using Content = std::vector<std::byte>;

  void TearDown() override { harness_.finish(); }

  static Content random_content(Bytes size, std::uint32_t seed) {
    std::mt19937 random(seed);
    Content content(size.size());
    std::generate(content.begin(), content.end(), [&] { return static_cast<std::byte>(random()); });
    return content;
  }

  // The bytes of `part` in the content of the whole block.
  static Content cut(const Content& content, const Part& part) {
    const auto begin = content.begin() + static_cast<std::ptrdiff_t>(part.begin.value);
    return Content(begin, begin + static_cast<std::ptrdiff_t>(part.bytes().value));
  }

  void write(const Part& part, const Content& content) {
    const auto lease = store_->fetch(part, Access::kReadWrite);
    ASSERT_EQ(Bytes(lease->bytes().size()), part.bytes());
    harness_.write(lease->bytes(), cut(content, part));
  }
  void write(BlockId block, const Content& content) {
    write(Part{block, 0_B, store_->size_of(block)}, content);
  }

  Content read(const Part& part) {
    const auto lease = store_->fetch(part, Access::kRead);
    Content content(lease->bytes().size());
    harness_.read(content, lease->bytes());
    return content;
  }
  Content read(BlockId block) { return read(Part{block, 0_B, store_->size_of(block)}); }

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

TYPED_TEST_P(StateStoreConformance, PartsAreThoseOfTheWholeBlock) {
  const Bytes size = 20580_B;
  const BlockId block = this->add("block", size);
  const auto content = this->random_content(size, 4);
  const std::vector<Part> parts{
      {block, 0_B, 4096_B}, {block, 4096_B, 16384_B}, {block, 16384_B, size}};
  for (const Part& part : parts) this->write(part, content);
  EXPECT_EQ(this->read(block), content);
  const auto other = this->random_content(size, 5);
  this->write(block, other);
  for (const Part& part : parts) EXPECT_EQ(this->read(part), this->cut(other, part));
}

TYPED_TEST_P(StateStoreConformance, APartThatWasNotWrittenIsZeroes) {
  const BlockId block = this->add("block", 12300_B);
  std::vector<std::byte> expected(12300);
  const Part middle{block, 4096_B, 8192_B};
  const auto content = this->random_content(12300_B, 6);
  this->write(middle, content);
  std::copy_n(content.begin() + 4096, 4096, expected.begin() + 4096);
  EXPECT_EQ(this->read(Part{block, 8192_B, 12300_B}), std::vector<std::byte>(4108));
  EXPECT_EQ(this->read(block), expected);
}

TYPED_TEST_P(StateStoreConformance, PartsOfOneBlockAreLeasedTogether) {
  const BlockId block = this->add("block", 16384_B);
  const std::vector<Part> parts{{block, 8192_B, 16384_B}, {block, 0_B, 4096_B}};
  const auto content = this->random_content(16384_B, 7);
  auto leases = this->store_->fetch_all(parts, Access::kReadWrite);
  ASSERT_EQ(leases.size(), 2U);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    ASSERT_EQ(leases[i]->bytes().size(), parts[i].bytes().size());
    this->harness_.write(leases[i]->bytes(), this->cut(content, parts[i]));
  }
  leases.clear();
  for (const Part& part : parts) EXPECT_EQ(this->read(part), this->cut(content, part));
  EXPECT_TRUE(this->store_->fetch_all({}, Access::kRead).empty());
}

TYPED_TEST_P(StateStoreConformance, PartsThatOverlapAreRefused) {
  const BlockId block = this->add("layers.3.exp_avg", 16384_B);
  const std::vector<Part> both{{block, 0_B, 8192_B}, {block, 4096_B, 16384_B}};
  EXPECT_THROW(this->store_->fetch_all(both, Access::kRead), UsageError);
  auto lease = this->store_->fetch(both[0], Access::kRead);
  try {
    this->store_->fetch(both[1], Access::kRead);
    FAIL() << "leased twice";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("layers.3.exp_avg"));
  }
  EXPECT_NO_THROW(this->store_->fetch(Part{block, 8192_B, 16384_B}, Access::kRead));
  lease.reset();
  EXPECT_NO_THROW(this->store_->fetch(both[1], Access::kRead));
}

TYPED_TEST_P(StateStoreConformance, WhatIsNoPartOfItsBlockIsRefused) {
  const BlockId block = this->add("block", 10000_B);
  for (const auto& [begin, end] : std::vector<std::pair<int, int>>{{-4096, 4096},
                                                                   {0, 10001},
                                                                   {0, 12288},
                                                                   {64, 4096},
                                                                   {0, 100},
                                                                   {8192, 4096},
                                                                   {4096, 9999}}) {
    EXPECT_THROW(this->store_->fetch(Part{block, Bytes(begin), Bytes(end)}, Access::kRead),
                 UsageError)
        << begin << " to " << end;
  }
  EXPECT_EQ(this->read(Part{block, 8192_B, 10000_B}), std::vector<std::byte>(1808));
  EXPECT_TRUE(this->read(Part{block, 4096_B, 4096_B}).empty());
}

// As an optimizer works: three blocks, element by element, in runs of elements.
TYPED_TEST_P(StateStoreConformance, BlocksOfAnySizeAreWorkedOnInParts) {
  const std::int64_t numel = 30000;
  std::vector<BlockId> blocks;
  const std::vector<int> bits{16, 32, 32};
  for (const int of_one : bits) blocks.push_back(this->add("block", Bytes(numel * of_one / 8)));
  const Bytes budget = std::min(this->store_->lease_budget(0), 64_KiB);
  const std::int64_t step = elements_at_once(bits, budget).value;
  for (int round = 1; round < 4; ++round) {
    for (std::int64_t begin = 0; begin < numel; begin += step) {
      const std::int64_t end = std::min(begin + step, numel);
      std::vector<Part> parts;
      for (std::size_t i = 0; i < bits.size(); ++i)
        parts.push_back({blocks[i], Bytes(begin * bits[i] / 8), Bytes(end * bits[i] / 8)});
      auto leases = this->store_->fetch_all(parts, Access::kReadWrite);
      for (std::size_t i = 0; i < bits.size(); ++i) {
        std::vector<std::byte> content(leases[i]->bytes().size());
        this->harness_.read(content, leases[i]->bytes());
        const auto before = static_cast<std::byte>((round - 1) * static_cast<int>(i + 1));
        ASSERT_EQ(content, std::vector<std::byte>(content.size(), before)) << begin;
        const auto after = static_cast<std::byte>(round * static_cast<int>(i + 1));
        std::ranges::fill(content, after);
        this->harness_.write(leases[i]->bytes(), content);
      }
    }
    this->store_->advance();
  }
  this->store_->flush();
}

TYPED_TEST_P(StateStoreConformance, CountsWhatItLends) {
  const BlockId block = this->add("block", 8192_B);
  const StoreCounts before = this->store_->counts();
  this->write(block, this->random_content(8192_B, 1));
  this->read(Part{block, 0_B, 4096_B});
  this->store_->flush();
  const StoreCounts moved = this->store_->counts() - before;
  EXPECT_EQ(moved.parts, 2);
  EXPECT_EQ(moved.written, this->store_->tier() == memory::Tier::kNvme ? 8192_B : 0_B);
}

TYPED_TEST_P(StateStoreConformance, WhatIsTakenBackWasNeverThere) {
  this->write(this->add("stays", 8192_B), this->random_content(8192_B, 3));
  const Bytes before = this->harness_.charged(memory::Kind::kOptimizerState);
  const std::vector<BlockId> added{this->add("goes", 8192_B)};
  this->store_->take_back(added);
  EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), before);
  EXPECT_EQ(this->add("next", 4096_B), added.front());
  EXPECT_EQ(this->read(added.front()), std::vector<std::byte>(4096));
  EXPECT_EQ(this->read(BlockId{0}), this->random_content(8192_B, 3));
}

REGISTER_TYPED_TEST_SUITE_P(
    StateStoreConformance, SaysItsTier, WhatIsTakenBackWasNeverThere, ABlockBeginsAsZeroesOfItsSize,
    BlocksThatComeTogetherAreBlocksLikeOthers, OfBlocksThatDoNotFitTogetherNoneIsThere,
    ALeaseIsAlignedTo64Bytes, WhatWasWrittenSurvivesManyFetchesInAnyOrder,
    SeveralBlocksAreLeasedTogether, ASecondLeaseOfABlockIsRefusedByName, AnUnknownBlockIsAnError,
    RunningOutAtAddLeavesTheEarlierBlocksAsTheyWere, ChargesItsTierByKindUntilItGoes,
    PartsAreThoseOfTheWholeBlock, APartThatWasNotWrittenIsZeroes, PartsOfOneBlockAreLeasedTogether,
    PartsThatOverlapAreRefused, WhatIsNoPartOfItsBlockIsRefused, BlocksOfAnySizeAreWorkedOnInParts,
    CountsWhatItLends);

}  // namespace strata::offload
