// Tiles under the engine: a parameter that is used by an embedding and by a head, tile by tile.
#include <gtest/gtest.h>

#include "engine/core/tile_cases.h"

namespace strata::engine::fake {
namespace {

constexpr memory::Tier kDevice = memory::Tier::kDevice;

TEST(Tiles, GradientsOfTwoUsesAddUpToThatOfBoth) {
  for (const int world : {1, 2, 4}) {  // so that means are exact
    for (const int micro_steps : {1, 2}) {
      EXPECT_TRUE(trained(world, {2, true, micro_steps}, {}) ==
                  trained(world, {1, false, micro_steps}, {}))
          << world << " ranks, " << micro_steps << " micro-steps";
    }
  }
}

TEST(Tiles, AGradientThatIsWrittenInPlaceCountsAsOneThatIsBrought) {
  for (const bool at_boundary : {false, true}) {  // and is added to earlier ones
    RankOptions options;
    options.engine.reduce_at_boundary = at_boundary;
    for (const int world : {1, 2, 3}) {
      EXPECT_TRUE(trained(world, {2, true, 2, true}, options) ==
                  trained(world, {2, true, 2, false}, options))
          << world << " ranks, at the boundary: " << at_boundary;
    }
  }
}

// The one in use and the one ahead, which share two buffers though the last tile is shorter; beside
// them the layer. One gradient, and as much of the layer as may be under reduction.
TEST(Tiles, FewAreThereAtOnce) {
  for (const bool written : {false, true}) {
    const FakeModel model = tiled_model(2);
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      RankOptions options;
      options.engine.stage = 3;
      options.engine.max_reducing = 100_MiB;
      FakeRank rank(model, options, std::move(collectives));
      for (int step = 0; step < 3; ++step) train(rank, r, {2, true, 2, written});
      EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGathered), kTileBytes * 3);
      EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGradients), kTileBytes * 5 / 2);
    }));
  }
}

TEST(Tiles, AUseThatBringsNoGradientHoldsNothingUp) {
  const FakeModel model = tiled_model(2);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    for (int step = 0; step < 3; ++step) train(rank, r, {});
    EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGradients), kTileBytes * 4);
  }));
  EXPECT_TRUE(trained(2, {2}, {}) == trained(2, {1}, {}));
}

TEST(Tiles, TheSecondUseIsFetchedAheadToo) {
  const FakeModel model = tiled_model(2);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    train(rank, r, {2, true});
    train(rank, r, {2, true});
    const StepCounts before = rank.engine().recorder().counts();
    rank.engine().begin_forward();
    use_tiles(rank, false);
    rank.in_scope(rank.model().plan.scopes[1]);
    use_tiles(rank, false);
    const StepCounts after = rank.engine().recorder().counts();
    EXPECT_EQ(after.late_fetches, before.late_fetches);
  }));
}

}  // namespace
}  // namespace strata::engine::fake
