// The placement of optimizer states and gradients changes no bit of a step.
#include <gtest/gtest.h>

#include "engine/core/offloaded_cases.h"
#include "strata/engine/optimize/host_lane.h"

namespace strata::engine::fake {
namespace {

using Placement = std::tuple<memory::Tier, int>;  // and the stage

class OffloadedStep : public ::testing::TestWithParam<Placement> {};

TEST_P(OffloadedStep, HasTheBitsOfThePlainLoop) {
  const auto tier = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  expect_bits_where_states_rest(tier, stage, Over::kThreads);
}

TEST_P(OffloadedStep, HasTheBitsOfThePlainLoopWhereAUnitHasSeveralDTypes) {
  const auto tier = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const testing::TemporaryFolder folder;
  const FakeModel model(mixed_builder());
  Case c{DType::kFloat32, 2, 2, {}, 1.0, Over::kPeers};
  c.options.engine.stage = stage;
  place_states(c.options.engine, tier, folder.path());
  expect_bits_of_reference(model, c, plain_script(model));
}

TEST_P(OffloadedStep, HasTheBitsOfThePlainLoopWhereGradientsAreReducedAtTheBoundary) {
  const auto tier = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const testing::TemporaryFolder folder;
  const FakeModel model(small_builder(DType::kBFloat16));
  Case c{DType::kBFloat16, 2, 2, {}, 1.0};
  c.options.engine.stage = stage;
  c.options.engine.reduce_at_boundary = true;
  place_states(c.options.engine, tier, folder.path());
  expect_bits_of_reference(model, c, plain_script(model));
}

// The device holds only weights, ranges in transfer, and a scratch or two for arriving gradients.
TEST_P(OffloadedStep, HoldsNoStatesOnTheDevice) {
  const auto tier = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const testing::TemporaryFolder folder;
  const FakeModel model(uneven_builder(DType::kBFloat16));
  RankOptions options;
  options.engine.stage = stage;
  place_states(options.engine, tier, folder.path());
  expect_no_errors(run_ranks(1, [&](int, std::shared_ptr<comm::Collectives> collectives) {
    FakeRank rank(model, options, std::move(collectives));
    rank.forward();
    add_all(rank, all_gradients(model, 0, 0, 0), {}, /*boundary=*/true);
    ASSERT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
    const memory::Ledger& ledger = rank.ledger();
    using memory::Kind;
    EXPECT_EQ(ledger.peak(memory::Tier::kDevice, Kind::kOptimizerState), 0_B);
    EXPECT_EQ(ledger.peak(memory::Tier::kDevice, Kind::kMasterWeights), 0_B);
    const Bytes states = ledger.held(memory::Tier::kHost, Kind::kOptimizerState);
    if (tier == memory::Tier::kNvme) {
      EXPECT_EQ(states, 0_B);
      EXPECT_EQ(ledger.peak(memory::Tier::kHost, Kind::kStaging), kTightStaging);
    } else {
      EXPECT_GE(states, Bytes(8 * kManyElements));
    }
    EXPECT_GE(ledger.held(memory::Tier::kHost, Kind::kGradientShards), Bytes(4 * kManyElements));
  }));
}

INSTANTIATE_TEST_SUITE_P(Placements, OffloadedStep,
                         ::testing::Combine(::testing::Values(memory::Tier::kHost,
                                                              memory::Tier::kNvme),
                                            ::testing::Values(1, 2, 3)));

TEST(LaneDealer, SharesBySpeedOfTheLastSteps) {
  constexpr std::int64_t kParts = 1000;
  LaneDealer dealer{UpdateLanes{}};
  std::int64_t host = 0;
  for (int step = 0; step < 12; ++step) {
    dealer.begin_step();
    host = 0;
    for (std::int64_t i = 0; i < kParts; ++i) host += dealer.to_host(Numel(1)) ? 1 : 0;
    const auto time = [](std::int64_t numel, double speed) {
      return LaneTime{Numel(numel), static_cast<double>(numel) / speed};
    };
    dealer.learn({.device = time(kParts - host, 1e9), .host = time(host, 3e9)});
  }
  EXPECT_NEAR(static_cast<double>(host), 0.75 * kParts, 0.05 * kParts);
}

}  // namespace
}  // namespace strata::engine::fake
