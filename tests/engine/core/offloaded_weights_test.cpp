// The placement of sharded units' weights changes no bit of a step.
#include <gtest/gtest.h>

#include "engine/core/external_cases.h"
#include "engine/core/offloaded_cases.h"

namespace strata::engine::fake {
namespace {

using Tiers = std::tuple<memory::Tier, memory::Tier>;  // of weights, of states

class OffloadedWeights : public ::testing::TestWithParam<Tiers> {
 protected:
  EngineOptions placed() const {
    const auto weights = std::get<0>(GetParam());
    const auto states = std::get<1>(GetParam());
    EngineOptions options;
    options.stage = 3;
    options.weights = {weights, {}, {folder_.path()}, kTightStaging, {}, /*verify=*/true};
    if (states != memory::Tier::kDevice) place_states(options, states, folder_.path());
    return options;
  }

 private:
  testing::TemporaryFolder folder_;
};

TEST_P(OffloadedWeights, HaveTheBitsOfThePlainLoop) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 3; ++world) {
      const double scale = dtype == DType::kFloat16 ? 1024.0 : 1.0;
      Case c{dtype, world, world == 2 ? 3 : 1, {}, scale, Over::kJoint};
      c.options.engine = placed();
      c.options.engine.gradient_clipping = world == 3 ? 0.0 : 0.25;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

TEST_P(OffloadedWeights, HaveThemWhereAUnitHasSeveralDTypes) {
  const FakeModel model(mixed_builder());
  Case c{DType::kFloat32, 2, 2, {}, 1.0, Over::kJoint};
  c.options.engine = placed();
  expect_bits_of_reference(model, c, plain_script(model));
}

TEST_P(OffloadedWeights, HaveThemWhereANetworkGathers) {
  const FakeModel model(uneven_builder(DType::kBFloat16));
  Case c{DType::kBFloat16, 3, 1, {}, 1.0, Over::kPeersReduce};
  c.options.engine = placed();
  expect_bits_of_reference(model, c, plain_script(model));
}

// The engine keeps no unit from one use to the next.
TEST_P(OffloadedWeights, HaveThemWhereOneUnitIsGatheredAtATime) {
  const FakeModel model(uneven_builder(DType::kBFloat16));
  Case c{DType::kBFloat16, 2, 1, {}, 1.0, Over::kJoint};
  c.options.engine = placed();
  c.options.engine.max_live = 1_B;
  c.options.engine.prefetch = Bytes();
  expect_bits_of_reference(model, c, plain_script(model));
}

TEST_P(OffloadedWeights, HaveThemOnADeviceThatRunsAhead) {
  const FakeModel model(uneven_builder(DType::kBFloat16));
  Case c{DType::kBFloat16, 1, 2, {}, 1.0, Over::kLatePeers};
  c.options.engine = placed();
  expect_bits_of_reference(model, c, plain_script(model));
}

// A user's optimizer holds all masters, so these do not lie on a drive.
TEST_P(OffloadedWeights, HaveThemWhereAUsersOptimizerUpdates) {
  if (std::get<1>(GetParam()) == memory::Tier::kNvme) return;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 2; ++world) {
      const bool late = world == 1 && std::get<1>(GetParam()) == memory::Tier::kHost;
      Case c{dtype, world, 2, {}, 1.0, late ? Over::kLatePeers : Over::kJoint};
      c.options.rule = UpdateRule::kExternal;
      c.options.engine = placed();
      c.options.engine.gradient_clipping = 0.25;
      c.begins = update_on_the_host;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

TEST_P(OffloadedWeights, AreNotInMemoryOfTheDevice) {
  const auto weights = std::get<0>(GetParam());
  const FakeModel model(uneven_builder(DType::kBFloat16));
  RankOptions options;
  options.engine = placed();
  expect_no_errors(run_ranks(1, [&](int, std::shared_ptr<comm::Collectives> collectives) {
    FakeRank rank(model, options, std::move(collectives));
    using memory::Kind;
    EXPECT_EQ(rank.ledger().held(memory::Tier::kDevice, Kind::kWeights), 0_B);
    const Bytes host = rank.ledger().held(memory::Tier::kHost, Kind::kWeights);
    if (weights == memory::Tier::kHost) {
      EXPECT_GE(host, Bytes(2 * kManyElements));
    } else {
      EXPECT_EQ(host, 0_B);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Tiers, OffloadedWeights,
                         ::testing::Values(Tiers{memory::Tier::kHost, memory::Tier::kDevice},
                                           Tiers{memory::Tier::kNvme, memory::Tier::kDevice},
                                           Tiers{memory::Tier::kHost, memory::Tier::kHost},
                                           Tiers{memory::Tier::kNvme, memory::Tier::kHost},
                                           Tiers{memory::Tier::kHost, memory::Tier::kNvme},
                                           Tiers{memory::Tier::kNvme, memory::Tier::kNvme}));

}  // namespace
}  // namespace strata::engine::fake
