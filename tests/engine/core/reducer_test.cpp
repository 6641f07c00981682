#include "strata/engine/reduce/reducer.h"

#include <gtest/gtest.h>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {
namespace {

constexpr memory::Tier kDevice = memory::Tier::kDevice;
constexpr memory::Kind kGradients = memory::Kind::kGradients;

// Buffers of one rank, and the bytes that they hold.
struct Pool {
  comm::LocalGroup group{1};
  std::unique_ptr<comm::Collectives> collectives = group.rank(0);
  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();
  GradientBuffers buffers = make_gradient_buffers("test", *collectives, ledger);

  // A pass that uses `count` buffers at once.
  void use(int count) {
    std::vector<GradientBuffers::Lease> taken;
    for (int i = 0; i < count; ++i) taken.push_back(buffers.acquire(4_KiB));
    taken.clear();
    buffers.end_round();
  }
  Bytes held() const { return ledger->held(kDevice, kGradients); }
};

TEST(GradientBuffers, AreKeptForReuseAndFreedWhenAPassHadNoUseForThem) {
  Pool pool;
  pool.use(5);
  EXPECT_EQ(pool.held(), 4_KiB * 5);
  pool.use(2);
  EXPECT_EQ(pool.held(), 4_KiB * 2);
  for (int i = 0; i < 3; ++i) pool.use(2);
  EXPECT_EQ(pool.ledger->charges(kDevice), 5);
}

TEST(GradientBuffers, AreThoseOfTheBusiestOfTheLastPasses) {
  Pool pool;
  pool.use(9);
  pool.use(4);
  for (int pass = 0; pass < 30; ++pass) pool.use(pass % 8 == 0 ? 4 : 2);
  EXPECT_EQ(pool.held(), 4_KiB * 4);
  EXPECT_EQ(pool.ledger->charges(kDevice), 9);
  for (int pass = 0; pass < 20; ++pass) pool.use(1);
  EXPECT_EQ(pool.held(), 4_KiB);
}

TEST(GradientBuffers, ThoseThatOutliveAPassAreNotCountedTwice) {
  Pool pool;
  auto late = pool.buffers.acquire(4_KiB);
  pool.buffers.acquire(4_KiB).reset();
  pool.buffers.end_round();
  late.reset();
  pool.buffers.end_round();
  EXPECT_EQ(pool.held(), 4_KiB);
}

TEST(Reducer, AGradientThatNeverComesDoesNotKeepAllOthersInMemory) {
  constexpr std::int64_t kBlock = 4096;
  plan::ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 12; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.linear(layer, "used", kBlock - 64);
    b.linear(layer, "unused", 64);
  }
  const FakeModel model(b);
  const Bytes unit(kBlock * 4);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.max_reducing = unit;
    FakeRank rank(model, options, std::move(collectives));
    for (int pass = 0; pass < 3; ++pass) {
      // Another parameter is missing in each pass, so the learned order never holds.
      const int missing = pass == 1 ? 5 : model.count() - 1;
      rank.forward();
      rank.backward(true, [&](int p) {
        if (p == missing && r == pass % 2) return;
        rank.add(p, noises(1, model.numel(p)));
      });
      rank.engine().step(std::vector<GroupScalars>(1), 1.0, false);
      // Two that wait, the one that made them too many, the one in front, one under reduction.
      EXPECT_LE(rank.ledger().peak(kDevice, kGradients), unit * 5) << "pass " << pass;
    }
  }));
}

}  // namespace
}  // namespace strata::engine::fake
