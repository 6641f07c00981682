// Tiles under the engine: a parameter that is used by an embedding and by a head, tile by tile.
#include <gtest/gtest.h>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {
namespace {

constexpr memory::Tier kDevice = memory::Tier::kDevice;
constexpr int kTiles = 6;
constexpr std::int64_t kTile = 4096;
constexpr Bytes kTileBytes(kTile * 4);

// A parameter in tiles, used by `uses` modules, around a layer.
FakeModel tiled_model(int uses) {
  plan::ModelBuilder b;
  const int embed = b.module(0, "embed", "Embedding");
  for (int i = 0; i < kTiles; ++i) {
    const int p = b.param(embed, "weight" + std::to_string(i), kTile);
    b.params[static_cast<std::size_t>(p)].tile =
        plan::TileOf{"embed.weight", {kTiles * kTile}, Numel(kTile * i), uses};
  }
  b.linear(0, "layer", kTile);
  const int head = b.module(0, "head", "Linear");
  for (int i = 0; i < kTiles; ++i) b.tie(head, i);
  return FakeModel(b);
}

Values gradient_of(int rank, int param, int use, Numel numel) {
  return noises(static_cast<std::uint64_t>(100 * rank + 10 * use + param), numel);
}

Values sum(Values one, const Values& other) {
  for (std::size_t i = 0; i < one.size(); ++i) one[i] += other[i];
  return one;
}

void use_tiles(FakeRank& rank, bool backwards, const std::function<void(int)>& inside = {}) {
  for (int i = 0; i < kTiles; ++i) {
    const int unit = backwards ? kTiles - 1 - i : i;
    rank.gatherer().acquire(unit);
    if (inside) inside(unit);
    rank.gatherer().release(unit);
  }
}

// `apart`: each use brings its gradient; else the second brings the sum.
void train(FakeRank& rank, int r, bool apart, int micro_steps) {
  const int layer = kTiles;
  for (int m = 0; m < micro_steps; ++m) {
    Engine& engine = rank.engine();
    engine.begin_forward();
    use_tiles(rank, false);
    rank.in_scope(rank.model().plan.scopes[1]);
    use_tiles(rank, false);
    engine.begin_backward(m + 1 == micro_steps);
    use_tiles(rank, true, [&](int p) {
      if (apart) rank.add(p, gradient_of(r, p, 0, rank.model().numel(p)));
    });
    rank.add(layer, gradient_of(r, layer, 0, rank.model().numel(layer)));
    for (int p = kTiles; p-- > 0;) {
      const Values second = gradient_of(r, p, 1, rank.model().numel(p));
      const Values first = gradient_of(r, p, 0, rank.model().numel(p));
      rank.add(p, apart ? second : sum(second, first));
    }
    engine.end_backward();
    engine.end_micro_step();
  }
  rank.engine().step(std::vector<GroupScalars>(1, {1e-2, 0.9, 0.999, 1e-8, 0.1}), 1.0, false);
}

std::vector<std::vector<std::byte>> trained(int world, int uses, bool apart, int micro_steps,
                                            const RankOptions& options) {
  const FakeModel model = tiled_model(uses);
  std::vector<std::vector<std::byte>> weights;
  expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    FakeRank rank(model, options, std::move(collectives));
    for (int step = 0; step < 3; ++step) train(rank, r, apart, micro_steps);
    std::vector<std::vector<std::byte>> mine;
    for (int p = 0; p < model.count(); ++p) mine.push_back(rank.weight(p));
    if (r == 0) weights = std::move(mine);
  }));
  return weights;
}

TEST(Tiles, GradientsOfTwoUsesAddUpToThatOfBoth) {
  for (const int world : {1, 2, 4}) {  // so that means are exact
    for (const int micro_steps : {1, 2}) {
      RankOptions options;
      options.engine.stage = 3;
      EXPECT_TRUE(trained(world, 2, true, micro_steps, options) ==
                  trained(world, 1, false, micro_steps, options))
          << world << " ranks, " << micro_steps << " micro-steps";
    }
  }
}

TEST(Tiles, FewAreThereAtOnce) {
  const FakeModel model = tiled_model(2);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    options.engine.max_reducing = 100_MiB;
    FakeRank rank(model, options, std::move(collectives));
    for (int step = 0; step < 3; ++step) train(rank, r, true, 2);
    // The one in use, and the one ahead; beside them the layer.
    EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGathered), kTileBytes * 3);
    // One, and as much of the layer as may be under reduction.
    EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGradients), kTileBytes * 5 / 2);
  }));
}

TEST(Tiles, AUseThatBringsNoGradientHoldsNothingUp) {
  const FakeModel model = tiled_model(2);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    for (int step = 0; step < 3; ++step) train(rank, r, false, 1);
    EXPECT_LE(rank.ledger().peak(kDevice, memory::Kind::kGradients), kTileBytes * 4);
  }));
  RankOptions options;
  options.engine.stage = 3;
  EXPECT_TRUE(trained(2, 2, false, 1, options) == trained(2, 1, false, 1, options));
}

TEST(Tiles, TheSecondUseIsFetchedAheadToo) {
  const FakeModel model = tiled_model(2);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    train(rank, r, true, 1);
    train(rank, r, true, 1);
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
