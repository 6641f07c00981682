// Units that stay whole, between a step and their next use.
#include <gtest/gtest.h>

#include <thread>

#include "engine/core/short_passes.h"
#include "strata/engine/gather/gatherer.h"

namespace strata::engine::fake {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements

// Nine units.
FakeModel model_of_blocks() {
  plan::ModelBuilder b;
  b.linear(0, "embed", kBlock);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 8; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "proj", "Linear"), "weight", kBlock);
  }
  return FakeModel(b);
}

// Stage 2, refreshed beside the next forward.
RankOptions late_refresh(bool can_await) {
  RankOptions options;
  options.engine.stage = 2;
  options.engine.refresh_late = true;
  options.can_await = can_await;
  return options;
}

TEST(GathererRefresh, AWholeUnitIsAwaitedFromTheStepToItsFirstUse) {
  const FakeModel model = model_of_blocks();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    for (int i = 0; i < 2; ++i) {
      train_one_pass(rank);
      for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
      step(rank);
      for (int unit = 0; unit < 9; ++unit) {
        EXPECT_TRUE(rank.views().awaited(unit));
        EXPECT_FALSE(rank.gatherer().gathered(unit));
      }
      rank.gatherer().complete(4);  // as a reader does
      rank.gatherer().complete(4);
      rank.gatherer().acquire(2);
      rank.gatherer().release(2);
      for (int unit = 0; unit < 9; ++unit) {
        EXPECT_EQ(rank.gatherer().gathered(unit), unit == 2 || unit == 4);
        EXPECT_EQ(rank.views().attached(unit), unit == 2 || unit == 4);
      }
    }
  });
}

TEST(GathererRefresh, AWholeUnitThatNobodyUsesIsCompleteBeforeItsShardsChangeAgain) {
  const FakeModel model = model_of_blocks();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    rank.engine().begin_forward();  // nothing is used in it
    rank.engine().begin_backward(true);
    for (int p = 0; p < model.count(); ++p) rank.add(p, noises(1, model.numel(p)));
    rank.engine().end_backward();
    rank.gatherer().invalidate(Changed::kTrainable);
    for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
    step(rank);
    const std::vector<std::byte> late = rank.weight(3);
    const auto everybody = rank.collectives().all_gather_text(
        std::string(reinterpret_cast<const char*>(late.data()), late.size()));
    EXPECT_EQ(everybody[0], everybody[1]);
  });
}

// Another thread that looks at weights while this one trains, such as a moving average of them.
TEST(GathererRefresh, ReadersInOtherThreadsCompleteUnitsBesideTraining) {
  const FakeModel model = model_of_blocks();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    rank.engine().recorder().set_timed(true);
    for (int i = 0; i < 20; ++i) {
      train_one_pass(rank);
      step(rank);
      std::thread reader([&rank] {
        for (int unit = 9; unit-- > 0;) {
          rank.gatherer().complete(unit);
          EXPECT_TRUE(rank.gatherer().gathered(unit));
        }
      });
      rank.forward();
      reader.join();
      for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
    }
  });
}

TEST(GathererRefresh, WhereReadersCannotBeToldWholeUnitsAreCompleteAfterTheStep) {
  const FakeModel model = model_of_blocks();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(false), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.gatherer().gathered(unit));
  });
}

}  // namespace
}  // namespace strata::engine::fake
