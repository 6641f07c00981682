#include "strata/engine/gather/gatherer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/limited_device.h"
#include "engine/core/short_passes.h"
#include "strata/memory/host_buffer.h"

namespace strata::engine::fake {
namespace {

using ::testing::HasSubstr;

constexpr memory::Tier kDevice = memory::Tier::kDevice;
constexpr memory::Kind kGathered = memory::Kind::kGathered;

RankOptions bounded(Bytes max_live, Bytes prefetch) {
  RankOptions options;
  options.engine.max_live = max_live;
  options.engine.prefetch = prefetch;
  return options;
}

TEST(Gatherer, GatheredAndFreeBytesNeverExceedTheBound) {
  const FakeModel model = model_of_blocks(kBlock, 3 * kBlock);
  for (const int blocks : {3, 4, 5, 8, 20}) {
    for (const Bytes prefetch : {0_B, block_bytes(), 100_MiB}) {
      on_two_ranks([&](auto collectives) {
        const Bytes bound = block_bytes() * blocks;
        FakeRank rank(model, bounded(bound, prefetch), std::move(collectives));
        for (int i = 0; i < 3; ++i) {
          train_one_pass(rank);
          step(rank);
        }
        EXPECT_LE(rank.ledger().peak(kDevice, kGathered), bound)
            << blocks << " blocks, prefetch " << prefetch.value;
      });
    }
  }
}

TEST(Gatherer, WhatIsInUseMayExceedTheBoundAndIsLetGoAtOnce) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(block_bytes() * 2, 0_B), std::move(collectives));
    for (int unit = 0; unit < 4; ++unit) rank.gatherer().acquire(unit);
    EXPECT_EQ(rank.gatherer().sharded().live(), block_bytes() * 4);
    for (int unit = 0; unit < 4; ++unit) rank.gatherer().release(unit);
    EXPECT_LE(rank.gatherer().sharded().live(), block_bytes() * 2);
    EXPECT_LE(rank.ledger().held(kDevice, kGathered), block_bytes() * 2);
    EXPECT_EQ(rank.ledger().peak(kDevice, kGathered), block_bytes() * 4);
  });
}

TEST(Gatherer, APassAllocatesNothingAfterTheFirst) {
  const FakeModel model = model_of_blocks(kBlock, 2 * kBlock);
  for (const int blocks : {4, 6, 30}) {
    on_two_ranks([&](auto collectives) {
      FakeRank rank(model, bounded(block_bytes() * blocks, block_bytes()), std::move(collectives));
      // The embedding's buffer stays beside those of the blocks, used or free.
      rank.gatherer().acquire(0);
      train_one_pass(rank);
      train_one_pass(rank);
      const std::int64_t warm = rank.ledger().charges(kDevice);
      for (int i = 0; i < 3; ++i) train_one_pass(rank);
      EXPECT_EQ(rank.ledger().charges(kDevice), warm) << blocks << " blocks";
      rank.gatherer().release(0);
    });
  }
}

TEST(Gatherer, APassAllocatesLittleWhereUnitsOfSeveralSizesDoNotAllFit) {
  plan::ModelBuilder b;
  b.linear(0, "embed", 6 * kBlock);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 16; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "attention", "Linear"), "weight", kBlock);
    b.param(b.module(layer, "up", "Linear"), "weight", 8 * kBlock);
    b.param(b.module(layer, "down", "Linear"), "weight", 4 * kBlock);
  }
  b.linear(0, "head", 6 * kBlock);
  plan::PlanOptions small;
  small.block_unit_bytes = block_bytes();
  const FakeModel model(b, small);
  ASSERT_EQ(model.plan.units.size(), 50U);
  for (const int blocks : {52, 70}) {  // a layer takes 13
    on_two_ranks([&](auto collectives) {
      FakeRank rank(model, bounded(block_bytes() * blocks, block_bytes()), std::move(collectives));
      const auto train = [&](int steps) {
        for (int i = 0; i < steps; ++i) {
          train_one_pass(rank);
          step(rank);
        }
        return rank.ledger().charges(kDevice);
      };
      const std::int64_t warm = train(3);
      // Allocations for the two ends of the model, whose size no other unit has, and for the units
      // that were evicted for them.
      EXPECT_LE(train(4) - warm, 4 * 6) << blocks << " blocks";
    });
  }
}

TEST(Gatherer, StepsAllocateNothingOnceEverySizeFits) {
  const FakeModel model = model_of_blocks(kBlock, 3 * kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(100_MiB, 1_MiB), std::move(collectives));
    std::int64_t warm = 0;
    for (int i = 0; i < 4; ++i) {
      train_one_pass(rank);
      step(rank);
      EXPECT_EQ(rank.gatherer().sharded().live(), 0_B);
      if (i == 0) warm = rank.ledger().charges(kDevice);
    }
    EXPECT_EQ(rank.ledger().charges(kDevice), warm);
  });
}

// Graphs of a device keep the addresses of weights.
TEST(Gatherer, AStepFindsEachUnitWhereTheLastOneHadIt) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  for (const int blocks : {3, 4, 6, 20}) {
    for (const Bytes prefetch : {0_B, block_bytes(), 100_MiB}) {
      on_two_ranks([&](auto collectives) {
        FakeRank rank(model, bounded(block_bytes() * blocks, prefetch), std::move(collectives));
        Gatherer& gatherer = rank.gatherer();
        const auto addresses_of_a_step = [&] {
          std::vector<const std::byte*> addresses;
          const auto use = [&](int unit) {
            gatherer.acquire(unit);
            addresses.push_back(gatherer.flat(unit).data());
            gatherer.release(unit);
          };
          gatherer.start_pass();
          for (int unit = 0; unit < 9; ++unit) use(unit);
          for (int unit = 8; unit >= 0; --unit) use(unit);
          gatherer.invalidate(Changed::kTrainable);
          return addresses;
        };
        for (int i = 0; i < 3; ++i) addresses_of_a_step();
        const std::vector<const std::byte*> before = addresses_of_a_step();
        for (int i = 0; i < 3; ++i)
          EXPECT_EQ(addresses_of_a_step(), before) << blocks << " blocks, step " << i;
      });
    }
  }
}

TEST(Gatherer, KeepsTheLastBlocksOfForwardForBackward) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(block_bytes() * 4, 0_B), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    rank.forward();
    for (const int unit : {6, 7, 8}) EXPECT_TRUE(rank.gatherer().gathered(unit)) << unit;
    EXPECT_FALSE(rank.gatherer().gathered(1));
  });
}

TEST(Gatherer, PrefetchesWhatComesNextWithinItsBound) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(block_bytes() * 20, block_bytes() * 2), std::move(collectives));
    rank.gatherer().start_pass();
    rank.gatherer().acquire(0);
    EXPECT_EQ(rank.gatherer().sharded().live(), block_bytes() * 3)
        << "the unit in use and two ahead";
    EXPECT_FALSE(rank.gatherer().gathered(1)) << "attached only when used";
    rank.gatherer().release(0);
    rank.gatherer().acquire(1);
    EXPECT_EQ(rank.gatherer().sharded().live(), block_bytes() * 4);
    rank.gatherer().release(1);
  });
}

TEST(Gatherer, APrefetchEvictsNothingThatIsUsedBeforeIt) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(block_bytes() * 3, block_bytes() * 2), std::move(collectives));
    Gatherer& gatherer = rank.gatherer();
    // Learn an order in which units in use lie between the present one and the next.
    const auto pass = [&] {
      gatherer.start_pass();
      gatherer.acquire(3);
      gatherer.release(3);
      gatherer.acquire(0);
      gatherer.acquire(1);
      gatherer.acquire(0);
      gatherer.acquire(1);
      gatherer.release(1);
      gatherer.release(0);
      gatherer.acquire(3);
      gatherer.release(3);
      gatherer.acquire(4);
      for (const int unit : {0, 1, 4}) gatherer.release(unit);
    };
    pass();
    pass();
    gatherer.start_pass();
    gatherer.acquire(3);
    gatherer.release(3);
    gatherer.acquire(0);
    gatherer.acquire(1);
    EXPECT_TRUE(gatherer.gathered(3)) << "it is used before unit 4";
    gatherer.release(0);
    gatherer.release(1);
  });
}

TEST(Gatherer, AStepKeepsGatheredWeightsThatAreFrozen) {
  const FakeModel model = model_of_blocks(kBlock, kBlock, true);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, bounded(100_MiB, 0_B), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    EXPECT_FALSE(rank.gatherer().gathered(0)) << "the one that was trained";
    for (int unit = 1; unit <= 8; ++unit) EXPECT_TRUE(rank.gatherer().gathered(unit)) << unit;
    rank.engine().weights_changed();
    EXPECT_EQ(rank.gatherer().sharded().live(), 0_B);
  });
}

TEST(Gatherer, RefusesAStepWhileWeightsAreHeldAndForgetsNothing) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    train_one_pass(rank);
    rank.gatherer().acquire(2);
    try {
      step(rank);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("unit 'layers.1' cannot change while it is in use"));
    }
    rank.gatherer().release(2);
    step(rank);
  });
}

TEST(Gatherer, DiscardDropsWhatWasWrittenToTheCopy) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const auto before = rank.weight(1);
    const int unit = model.plan.unit_of_param[1];
    rank.gatherer().acquire(unit);
    rank.views().flat(unit)[0] ^= std::byte{1};
    rank.gatherer().discard(unit);
    EXPECT_EQ(rank.weight(1), before);
  });
}

// Room for the engine's own memory and `blocks` gathered blocks.
Bytes limit_for(const FakeModel& model, int blocks) {
  Bytes held;
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    rank.gatherer().sharded().evict_all();
    const memory::Ledger& ledger = rank.ledger();
    if (rank.collectives().rank() == 0) {
      // Weights lie in memory of the collectives, which the device's limit does not count.
      held = ledger.held(kDevice) - ledger.held(kDevice, kGathered) -
             ledger.held(kDevice, memory::Kind::kWeights);
    }
  });
  return held + block_bytes() * blocks;
}

TEST(Gatherer, AnExhaustedDeviceEvictsWhatNoOneUsesAndLeavesPrefetchesOut) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const Bytes limit = limit_for(model, 2);
  on_two_ranks([&](auto collectives) {
    RankOptions options = bounded(100_MiB, 100_MiB);  // more than there is
    options.device = std::make_shared<device::LimitedDevice>(limit);
    FakeRank rank(model, options, std::move(collectives));
    rank.forward();
    rank.forward();
  });
}

TEST(Gatherer, AnExhaustedDeviceIsReportedWithWhatIsInUseAndNothingLeaks) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const Bytes limit = limit_for(model, 2);
  on_two_ranks([&](auto collectives) {
    RankOptions options = bounded(100_MiB, 0_B);
    options.device = std::make_shared<device::LimitedDevice>(limit);
    FakeRank rank(model, options, std::move(collectives));
    rank.gatherer().acquire(1);
    rank.gatherer().acquire(2);
    try {
      rank.gatherer().acquire(3);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const OutOfMemoryError& error) {
      const std::string message = error.what();
      EXPECT_THAT(message, HasSubstr("the weights of unit 'layers.2' cannot be gathered"));
      EXPECT_THAT(message, HasSubstr("'layers.0' (16.0 KiB), 'layers.1' (16.0 KiB)"));
      EXPECT_THAT(message, HasSubstr("out of memory (gathered"));
    }
    EXPECT_FALSE(rank.gatherer().pinned(3));
    rank.gatherer().release(1);
    rank.gatherer().acquire(3);
    rank.gatherer().release(3);
    rank.gatherer().release(2);
  });
}

TEST(Gatherer, AtOneRankNothingIsGathered) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  expect_no_errors(run_ranks(1, [&](int, auto collectives) {
    FakeRank rank(model, bounded(0_B, 0_B), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    EXPECT_EQ(rank.ledger().peak(kDevice, kGathered), 0_B);
  }));
}

}  // namespace
}  // namespace strata::engine::fake
