// A model of a parameter in tiles that several modules use, and how it is trained.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/core/fake_model.h"
#include "engine/core/training_step_cases.h"

namespace strata::engine::fake {

inline constexpr int kTiles = 6;
inline constexpr std::int64_t kTile = 4096;  // elements; the last one has fewer
inline constexpr Bytes kTileBytes(kTile * 4);

// A parameter in tiles, used by `uses` modules, around a layer.
inline FakeModel tiled_model(int uses) {
  plan::ModelBuilder b;
  const int embed = b.module(0, "embed", "Embedding");
  const std::int64_t last = kTile - 1000;
  for (int i = 0; i < kTiles; ++i) {
    const int p = b.param(embed, "weight" + std::to_string(i), i + 1 < kTiles ? kTile : last);
    b.params[static_cast<std::size_t>(p)].tile =
        plan::TileOf{"embed.weight", {kTiles * kTile - 1000}, Numel(kTile * i), uses};
  }
  b.linear(0, "layer", kTile);
  const int head = b.module(0, "head", "Linear");
  for (int i = 0; i < kTiles; ++i) b.tie(head, i);
  return FakeModel(b);
}

inline Values gradient_of(int rank, int param, int use, Numel numel) {
  return noises(static_cast<std::uint64_t>(100 * rank + 10 * use + param), numel);
}

inline Values sum(Values one, const Values& other) {
  for (std::size_t i = 0; i < one.size(); ++i) one[i] += other[i];
  return one;
}

inline void use_tiles(FakeRank& rank, bool backwards, const std::function<void(int)>& inside = {}) {
  for (int i = 0; i < kTiles; ++i) {
    const int unit = backwards ? kTiles - 1 - i : i;
    rank.gatherer().acquire(unit);
    if (inside) inside(unit);
    rank.gatherer().release(unit);
  }
}

struct TileTraining {
  int uses = 1;
  bool apart = false;  // each use brings its gradient; else the second brings the sum
  int micro_steps = 1;
  bool written = false;  // by the model, where the engine says; else brought
};

inline void train(FakeRank& rank, int r, const TileTraining& how) {
  const int layer = kTiles;
  const auto give = [&](int p, const Values& gradient) {
    how.written ? rank.write(p, gradient) : rank.add(p, gradient);
  };
  for (int m = 0; m < how.micro_steps; ++m) {
    Engine& engine = rank.engine();
    engine.begin_forward();
    use_tiles(rank, false);
    rank.in_scope(rank.model().plan.scopes[1]);
    use_tiles(rank, false);
    engine.begin_backward(m + 1 == how.micro_steps);
    use_tiles(rank, true, [&](int p) {
      if (how.apart) give(p, gradient_of(r, p, 0, rank.model().numel(p)));
    });
    rank.add(layer, gradient_of(r, layer, 0, rank.model().numel(layer)));
    for (int p = kTiles; p-- > 0;) {
      const Values second = gradient_of(r, p, 1, rank.model().numel(p));
      const Values first = gradient_of(r, p, 0, rank.model().numel(p));
      give(p, how.apart ? second : sum(second, first));
    }
    engine.end_backward();
    engine.end_micro_step();
  }
  rank.engine().step(std::vector<GroupScalars>(1, {1e-2, 0.9, 0.999, 1e-8, 0.1}), 1.0, false);
}

// The weights of rank 0 after some steps.
inline std::vector<std::vector<std::byte>> trained(int world, const TileTraining& how,
                                                   RankOptions options,
                                                   Over over = Over::kThreads) {
  const FakeModel model = tiled_model(how.uses);
  options.engine.stage = 3;
  std::vector<std::vector<std::byte>> weights;
  expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions own = options;
    if (over == Over::kLatePeers) own.device = comm::conformance::late_device(r);
    FakeRank rank(model, own, joined(std::move(collectives), over, own.device));
    for (int step = 0; step < 3; ++step) train(rank, r, how);
    std::vector<std::vector<std::byte>> mine;
    for (int p = 0; p < model.count(); ++p) mine.push_back(rank.weight(p));
    if (r == 0) weights = std::move(mine);
  }));
  return weights;
}

}  // namespace strata::engine::fake
