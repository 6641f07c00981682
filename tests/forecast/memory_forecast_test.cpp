#include "strata/forecast/memory_forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "engine/core/short_passes.h"
#include "engine/core/training_step_cases.h"

namespace strata::forecast {
namespace {

using engine::fake::FakeModel;
using engine::fake::FakeRank;
using engine::fake::RankOptions;
using memory::Kind;
using memory::Tier;

// Blocks of equal size between an embedding and a head.
FakeModel blocks(DType dtype) {
  plan::ModelBuilder b;
  b.linear(0, "embed", 5000, dtype);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 6; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    const int inner = b.module(layer, "inner", "Inner");
    b.param(inner, "wide", 4000, dtype);
    b.param(inner, "small", 3, dtype);
  }
  b.linear(0, "head", 5000, dtype);
  return FakeModel(b);
}

struct Case {
  DType dtype;
  int stage;
  int world;
  int micro_steps = 1;
  std::optional<Bytes> live = std::nullopt;
  bool at_boundary = false;
  bool peers = false;  // collectives with an inbox
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << name_of(c.dtype) << " stage " << c.stage << " world " << c.world << " micro steps "
             << c.micro_steps << " live " << (c.live ? c.live->value : -1) << " at boundary "
             << c.at_boundary << " peers " << c.peers;
}

RankOptions options_of(const Case& c) {
  RankOptions options;
  options.engine.stage = c.stage;
  options.engine.reduce_at_boundary = c.at_boundary;
  if (c.live) options.engine.max_live = *c.live;
  return options;
}

// The ledger's peaks of one rank that trains.
MemoryForecast held(const FakeModel& model, const Case& c) {
  MemoryForecast result;
  engine::fake::expect_no_errors(
      engine::fake::run_ranks(c.world, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
        const auto over = c.peers ? engine::fake::Over::kPeers : engine::fake::Over::kThreads;
        FakeRank rank(model, options_of(c), engine::fake::joined(std::move(ranks), over));
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < c.micro_steps; ++micro) {
            rank.forward();
            engine::fake::add_all(rank, engine::fake::all_gradients(model, step, micro, r), {},
                                  micro + 1 == c.micro_steps);
          }
          rank.engine().step(engine::fake::groups_of(step), 1.0, false);
        }
        rank.collectives().barrier();
        if (r != 0) return;
        result = peaks_of(rank.ledger());
      }));
  return result;
}

comm::Traits traits_for(int world, bool peers = false) {
  return comm::among(peers ? comm::kPeerTraits : comm::kHostMemoryTraits, 0, world);
}

MemoryForecast forecast_over(const FakeModel& model, Training training,
                             const comm::Traits& traits) {
  training.traits = traits;
  return forecast_memory(model.params, model.plan, model.tree, training);
}

MemoryForecast foreseen(const FakeModel& model, const Case& c, bool runs_ahead = false) {
  Training training;
  training.options = options_of(c).engine;
  training.micro_steps = c.micro_steps;
  training.runs_ahead = runs_ahead;
  return forecast_over(model, training, traits_for(c.world, c.peers));
}

void expect_held_as_foreseen(const FakeModel& model, const Case& c) {
  const MemoryForecast expected = foreseen(model, c);
  const MemoryForecast found = held(model, c);
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<Kind>(k);
    // A reduction that ends before the engine waits for it frees its buffers earlier; an inbox
    // stays.
    if (kind == Kind::kGradients && !c.peers) {
      EXPECT_LE(found.of(kind), expected.of(kind));
    } else {
      EXPECT_EQ(found.of(kind), expected.of(kind)) << memory::name_of(kind);
    }
  }
  EXPECT_LE(found.total(), expected.total());
  EXPECT_GE(found.total() + expected.of(Kind::kGradients), expected.total());
}

class MemoryForecastTest : public testing::TestWithParam<Case> {};

TEST_P(MemoryForecastTest, IsWhatARankHoldsAtMost) {
  expect_held_as_foreseen(blocks(GetParam().dtype), GetParam());
}

TEST(MemoryForecast, OfSeveralDTypesInABlockIsWhatARankHoldsAtMost) {
  const FakeModel model(engine::fake::mixed_builder());
  for (const int stage : {0, 2, 3}) {
    for (const bool peers : {false, true})
      expect_held_as_foreseen(model, {DType::kFloat32, stage, 2, 2, {}, false, peers});
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MemoryForecastTest,
                         testing::Values(Case{DType::kFloat32, 0, 2}, Case{DType::kBFloat16, 1, 3},
                                         Case{DType::kBFloat16, 2, 2}, Case{DType::kBFloat16, 3, 2},
                                         Case{DType::kFloat32, 3, 3}, Case{DType::kFloat16, 3, 2},
                                         Case{DType::kBFloat16, 3, 2, 3},
                                         Case{DType::kBFloat16, 2, 2, 2, {}, true},
                                         Case{DType::kBFloat16, 3, 2, 1, 1_B},
                                         Case{DType::kBFloat16, 3, 2, 1, Bytes(3 * 4096)},
                                         Case{DType::kBFloat16, 3, 2, 2, 40_KiB, true},
                                         Case{DType::kBFloat16, 2, 2, 1, {}, false, true},
                                         Case{DType::kBFloat16, 3, 3, 1, {}, false, true},
                                         Case{DType::kFloat32, 3, 2, 3, 1_B, false, true}));

TEST(MemoryForecast, OfBoundsOfZeroIsTheUnitInUse) {
  for (const FakeModel& model :
       {engine::fake::model_of_blocks(engine::fake::kBlock, engine::fake::kBlock),
        engine::fake::model_of_neighbours(engine::fake::kBlock, Numel())}) {
    Training training;
    training.options = engine::fake::bounds_of_zero().engine;
    const MemoryForecast expected = forecast_over(model, training, traits_for(2));
    EXPECT_EQ(expected.of(Kind::kGathered), engine::fake::block_bytes());
  }
}

// If every gradient is reduced at once, there is an inbox and no buffer. The inbox has room for the
// gradients that may be under way and for the largest unit.
TEST(MemoryForecast, OfPeersHasRoomForWhatIsUnderWayAndAUnit) {
  const FakeModel model = blocks(DType::kBFloat16);
  Bytes largest;
  for (const plan::UnitSpec& unit : model.plan.units) {
    const plan::FlatLayout layout(model.params, unit.params, unit.dtype, 2);
    largest = std::max(largest, layout.flat_bytes());
  }
  Training training;
  training.options = options_of({DType::kBFloat16, 3, 2}).engine;
  training.options.max_reducing = 20_KiB;  // more than a block and a half
  const MemoryForecast expected = forecast_over(model, training, traits_for(2, true));
  EXPECT_EQ(expected.of(Kind::kGradients), 20_KiB + largest);
}

// Blocks of several units, whose gradients come in any order, the same in all.
TEST(MemoryForecast, HoldsForEveryOrderOfGradientsWithinABlock) {
  plan::ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 6; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    const int inner = b.module(layer, "inner", "Inner");
    for (const std::int64_t numel : {900, 4000, 8000, 30, 600, 30})
      b.param(inner, "w" + std::to_string(b.params.size()), numel, DType::kBFloat16);
  }
  plan::PlanOptions plan_options;
  plan_options.block_unit_bytes = 9_KiB;
  const FakeModel model(b, plan_options);
  ASSERT_GE(model.plan.units.size(), 18U);
  Case c{DType::kBFloat16, 3, 2};
  RankOptions options = options_of(c);
  options.engine.max_reducing = 20_KiB;
  Training training;
  training.options = options.engine;
  const MemoryForecast expected = forecast_over(model, training, traits_for(2));
  for (unsigned seed = 0; seed < 20; ++seed) {
    engine::fake::expect_no_errors(
        engine::fake::run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
          FakeRank rank(model, options, std::move(ranks));
          std::vector<int> order(6);
          std::iota(order.begin(), order.end(), 0);
          std::ranges::shuffle(order, std::mt19937(seed));
          for (int step = 0; step < 3; ++step) {
            rank.forward();
            std::vector<int> arrival;
            for (int block = 6; block-- > 0;) {
              for (const int place : order) arrival.push_back(6 * block + place);
            }
            engine::fake::add_all(rank, engine::fake::all_gradients(model, step, 0, r), arrival,
                                  true);
            rank.engine().step(engine::fake::groups_of(step), 1.0, false);
          }
          EXPECT_LE(rank.ledger().peak(Tier::kDevice, Kind::kGradients),
                    expected.of(Kind::kGradients))
              << "seed " << seed;
          EXPECT_LE(rank.ledger().peak(Tier::kDevice), expected.total()) << "seed " << seed;
        }));
  }
}

// A model far larger than this machine.
TEST(MemoryForecast, TakesNoMemory) {
  plan::ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 80; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    const int inner = b.module(layer, "inner", "Inner");
    for (int w = 0; w < 8; ++w)
      b.param(inner, "w" + std::to_string(w), 100'000'000, DType::kBFloat16);
  }
  const FakeModel model(b);
  for (const bool runs_ahead : {false, true}) {
    const MemoryForecast sharded = foreseen(model, {DType::kBFloat16, 3, 8}, runs_ahead);
    constexpr std::int64_t kShard = 80LL * 8 * 100'000'000 / 8;
    EXPECT_NEAR(static_cast<double>(sharded.of(Kind::kWeights).value), 2.0 * kShard, 4e6);
    EXPECT_NEAR(static_cast<double>(sharded.of(Kind::kOptimizerState).value), 8.0 * kShard, 4e6);
    EXPECT_NEAR(static_cast<double>(sharded.of(Kind::kMasterWeights).value), 2.125 * kShard, 1e6);
    EXPECT_GE(sharded.of(Kind::kGathered), 1600_MiB * 2 / 3) << "a block";
    EXPECT_LE(sharded.of(Kind::kGathered), 5_GiB);
  }
}

TEST(MemoryForecast, OfOneRankGathersNothing) {
  const FakeModel model = blocks(DType::kBFloat16);
  EXPECT_EQ(foreseen(model, {DType::kBFloat16, 3, 1}).of(Kind::kGathered), 0_B);
}

TEST(MemoryForecast, OfAnOptimizerOfTheUsersHasItsMastersAndGradientsOnce) {
  const FakeModel model = blocks(DType::kBFloat16);
  Training training;
  training.options.stage = 3;
  training.rule = engine::UpdateRule::kExternal;
  const MemoryForecast forecast = forecast_over(model, training, traits_for(2));
  EXPECT_EQ(forecast.of(Kind::kMasterWeights), forecast.of(Kind::kGradientShards));
  EXPECT_EQ(forecast.of(Kind::kOptimizerState), 0_B);
  // The user's optimizer reads fp32: it gets a copy of gradients that are kept in a narrower type.
  training.options.accumulation_dtype = DType::kBFloat16;
  const MemoryForecast narrow = forecast_over(model, training, traits_for(2));
  EXPECT_GE(narrow.of(Kind::kGradientShards) * 2, narrow.of(Kind::kMasterWeights) * 3);
}

TEST(MemoryForecast, OfAnOptimizerOfTheUsersOnTheHostHasItThere) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const FakeModel model = blocks(dtype);
    Training training;
    training.options.stage = 3;
    training.rule = engine::UpdateRule::kExternal;
    training.runs_ahead = true;
    training.options.states.tier = memory::Tier::kHost;
    training.options.gradient_tier = memory::Tier::kHost;
    const MemoryForecast forecast = forecast_over(model, training, traits_for(2));
    EXPECT_EQ(forecast.of(Kind::kMasterWeights), 0_B);
    const Bytes masters = forecast.on(memory::Tier::kHost, Kind::kMasterWeights);
    EXPECT_GT(masters, 0_B) << "fp32 weights have a copy there";
    EXPECT_EQ(masters, forecast.on(memory::Tier::kHost, Kind::kGradientShards));
  }
}

}  // namespace
}  // namespace strata::forecast
