// The engine's step on devices whose streams run late, as those of GPUs do. If a stream does not
// wait for another, it reads wrong values now and then, and a race detector sees it always.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/external_cases.h"
#include "engine/core/offloaded_cases.h"
#include "engine/core/parking_cases.h"
#include "engine/core/shard_group_cases.h"
#include "engine/core/short_passes.h"
#include "engine/core/tile_cases.h"
#include "engine/core/training_step_cases.h"

namespace strata::engine::fake {
namespace {

class LateStep : public ::testing::TestWithParam<int> {};

TEST_P(LateStep, HasTheBitsOfThePlainLoop) {
  plan::PlanOptions persistent;
  persistent.persistence_threshold = Numel(17);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(small_builder(dtype), persistent);
    for (const int world : {1, 2, 3}) {
      Case c{dtype, world, 2, {}, 1.0, Over::kLatePeers};
      c.options.engine.stage = GetParam();
      c.options.engine.gradient_clipping = 0.25;
      c.options.engine.late_norm = (dtype == DType::kBFloat16) == (world != 2);
      c.options.can_await = world == 2;
      c.options.keeps_gradients = world != 3;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereStatesRestElsewhere) {
  if (GetParam() == 0) return;  // nothing is sharded, nor offloaded
  for (const memory::Tier tier : {memory::Tier::kHost, memory::Tier::kNvme})
    expect_bits_where_states_rest(tier, GetParam(), Over::kLatePeers);
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhicheverLaneUpdates) {
  if (GetParam() > 0) expect_bits_whichever_lane_updates(GetParam());
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereStatesAreCached) {
  if (GetParam() == 0) return;  // nothing is sharded, nor offloaded
  for (const bool all : {false, true}) {
    expect_bits_where_states_are_cached(GetParam(), all, [&](FakeRank& rank) {
      EXPECT_GT(cached_states(rank), 0_B);
      if (!all) {
        EXPECT_LE(cached_states(rank), 256_KiB);
      }
    });
  }
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereCachedStatesAreGivenBack) {
  if (GetParam() == 0) return;
  expect_bits_where_states_are_cached(GetParam(), true, [](FakeRank& rank) {
    auto* const device = dynamic_cast<device::LateDevice*>(&rank.engine().device());
    if (device == nullptr) return;
    const bool had_some = cached_states(rank) > 0_B;
    EXPECT_FALSE(rank.engine().give_back_memory());  // others have enough
    device->free = 0_B;
    EXPECT_EQ(rank.engine().give_back_memory(), had_some);
    device->free.reset();
    EXPECT_EQ(cached_states(rank), 0_B);
  });
}

TEST(StateCache, LeavesMemoryForOthersAndWaitsWhileTheyGrow) {
  const FakeModel model(uneven_builder(DType::kBFloat16));
  const auto cached = [&](std::optional<Bytes> free, bool grow) {
    Case c{DType::kBFloat16, 1, 1, {}, 1.0, Over::kLatePeers};
    c.options.engine.lanes.cache = 1_GiB;
    c.options.engine.states = {memory::Tier::kHost, {}, {}, kTightStaging, {}};
    c.options.engine.gradient_tier = memory::Tier::kHost;
    c.begins = [&](FakeRank& rank) {
      dynamic_cast<device::LateDevice&>(rank.engine().device()).free = free;
    };
    Bytes most;
    c.between = [&](FakeRank& rank) {
      if (grow) {
        EXPECT_FALSE(rank.engine().give_back_memory());
      }
      most = std::max(most, cached_states(rank));
    };
    expect_bits_of_reference(model, c, plain_script(model));
    return most;
  };
  const Bytes all = cached(std::nullopt, false);
  EXPECT_GT(all, 1_MiB);
  EXPECT_EQ(cached(std::nullopt, true), 0_B);
  EXPECT_EQ(cached(1_GiB, false), 0_B);  // is for others
  const Bytes some = cached(1_GiB + 768_KiB, false);
  EXPECT_GT(some, 0_B);
  EXPECT_LT(some, all);
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereCachedStatesAreAwayBetweenPasses) {
  if (GetParam() == 0) return;
  expect_bits_where_states_are_cached(GetParam(), true, [](FakeRank& rank) {
    rank.engine().state_offload().offload_states(kAllStates, true);
    EXPECT_EQ(cached_states(rank), 0_B);
    rank.engine().state_offload().reload_states();
  });
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereAUsersOptimizerUpdatesOnTheHost) {
  if (GetParam() == 0) return;  // nothing is sharded, nor offloaded
  expect_bits_where_a_users_optimizer_is_offloaded(GetParam(), Over::kLatePeers);
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereAUsersOptimizersStatesAreAwayBetweenPasses) {
  if (GetParam() == 0) return;
  const testing::TemporaryFolder folder;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(small_builder(dtype));
    Case c = external_case(dtype, 2, GetParam(), Over::kLatePeers, folder.path());
    c.between = [](FakeRank& rank) { go_away_and_come_back(rank, true); };
    expect_bits_of_reference(model, c, plain_script(model));
  }
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWithinSmallBounds) {
  const FakeModel model(small_builder(DType::kBFloat16));
  for (const bool at_boundary : {false, true}) {
    for (const bool hard : {false, true}) {
      Case c{DType::kBFloat16, 3, 2, {}, 1.0, Over::kLatePeers};
      c.options.engine.stage = GetParam();
      c.options.engine.reduce_at_boundary = at_boundary;
      c.options.engine.max_live = 1_B;
      c.options.engine.max_live_is_hard = hard;
      c.options.keeps_gradients = hard;
      c.options.engine.max_reducing = 1_B;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

// The model has enough scopes that the engine frees gradients of the first ones in the same pass.
TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereGradientsAreLetGo) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  Case c{DType::kFloat32, 2, 1, {}, 1.0, Over::kLatePeers};
  c.options.engine.stage = GetParam();
  expect_bits_of_reference(model, c, plain_script(model));
}

// Each rank then needs other weights first after a step.
TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereRanksUseOtherUnits) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  for (const int world : {2, 3}) {
    Case c{DType::kFloat32, world, 1, {}, 1.0, Over::kLatePeers};
    c.options.engine.stage = GetParam();
    c.options.can_await = world == 2;
    c.options.engine.late_norm = world == 3;
    expect_bits_of_reference(model, c, script_of_own_blocks(model, world));
  }
}

// The host waits that rank 0 counts in the last of several steps. The model itself waits `of_model`
// times in each step, and once after it.
std::int64_t host_waits(const FakeModel& model, int stage, int of_model) {
  std::int64_t waits = -1;
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = stage;
    options.device = comm::conformance::late_device(r);
    FakeRank rank(model, options, joined(std::move(collectives), Over::kLatePeers, options.device));
    for (int step = 0; step < kSteps; ++step) {
      rank.forward();
      for (int i = 0; i < of_model; ++i) options.device->compute_stream().synchronize();
      add_all(rank, all_gradients(model, step, 0, r), {}, true);
      rank.engine().step(groups_of(step), 1.0, false);
      options.device->compute_stream().record()->wait();
    }
    if (r == 0) waits = rank.engine().step_report()->counts.host_waits;
  }));
  return waits;
}

TEST_P(LateStep, CountsWhatTheHostWaitsForWithinIt) {
  const FakeModel model(small_builder(DType::kBFloat16));
  const std::int64_t own = host_waits(model, GetParam(), 0);
  EXPECT_GE(own, 0);
  EXPECT_EQ(host_waits(model, GetParam(), 2), own + 2);
}

TEST_P(LateStep, HasTheBitsOfThePlainLoopWhereStatesAreAwayBetweenPasses) {
  expect_bits_with_states_away(GetParam(), Over::kLatePeers);
}

TEST(LateTiles, HaveTheSameBitsWhereGradientsAreWrittenInPlace) {
  for (const bool at_boundary : {false, true}) {
    RankOptions options;
    options.engine.reduce_at_boundary = at_boundary;
    options.engine.gradient_clipping = 0.25;
    for (const int world : {1, 2, 3}) {
      EXPECT_TRUE(trained(world, {2, true, 2, true}, options, Over::kLatePeers) ==
                  trained(world, {2, true, 2, false}, options))
          << world << " ranks, at the boundary: " << at_boundary;
    }
  }
}

TEST(LateTiles, HaveTheSameBitsWhereTheirStatesAreCached) {
  RankOptions options;
  options.engine.gradient_clipping = 0.25;
  RankOptions cached = options;
  cached.engine.lanes.cache = 1_GiB;
  cached.engine.states.tier = cached.engine.gradient_tier = memory::Tier::kHost;
  for (const int world : {1, 2})
    EXPECT_TRUE(trained(world, {2, true, 2, false}, cached, Over::kLatePeers) ==
                trained(world, {2, true, 2, false}, options))
        << world << " ranks";
}

INSTANTIATE_TEST_SUITE_P(Stages, LateStep, ::testing::Values(0, 1, 2, 3),
                         [](const auto& stage) { return fmt::format("Stage{}", stage.param); });

// Weights of rank 0 after training with gradients that are added up in bfloat16, which the plain
// loop does not do.
std::vector<std::vector<std::byte>> weights_of_narrow_sums(const FakeModel& model, Over over) {
  std::vector<std::vector<std::byte>> weights;
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.accumulation_dtype = DType::kBFloat16;
    options.engine.max_reducing = 1_KiB;
    if (over == Over::kLatePeers) options.device = comm::conformance::late_device(r);
    FakeRank rank(model, options, joined(std::move(collectives), over, options.device));
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        rank.forward();
        add_all(rank, all_gradients(model, step, micro, r), {}, micro == 2);
      }
      rank.engine().step(groups_of(step), 1.0, false);
    }
    for (int p = 0; p < model.count(); ++p) {
      auto weight = rank.weight(p);
      if (r == 0) weights.push_back(std::move(weight));
    }
  }));
  return weights;
}

TEST(LateStepOptions, AddsUpInANarrowDTypeAsWhereNothingIsLate) {
  const FakeModel model(small_builder(DType::kBFloat16));
  EXPECT_EQ(weights_of_narrow_sums(model, Over::kLatePeers),
            weights_of_narrow_sums(model, Over::kPeers));
}

TEST(LateStepOptions, MayEndWithAStepThatIsStillBeingDone) {
  const FakeModel model(small_builder(DType::kBFloat16));
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.device = comm::conformance::late_device(r);
    FakeRank rank(model, options, joined(std::move(collectives), Over::kLatePeers, options.device));
    for (int step = 0; step < kSteps; ++step) {
      rank.forward();
      add_all(rank, all_gradients(model, step, 0, r), {}, true);
      rank.engine().step(groups_of(step), 1.0, false);
    }
  }));
}

// Writes garbage to this rank's weights, and then the weights again. Returns the weights.
std::vector<std::byte> write_for_a_while(FakeRank& rank, device::LateDevice& device) {
  device::Stream& compute = device.compute_stream();
  std::vector<std::byte> found;
  for (const Unit& unit : rank.engine().weights().units()) {
    const std::span<std::byte> flat = rank.gatherer().flat(unit.id);
    const std::size_t begin = found.size();
    found.resize(begin + flat.size());
    device.enqueue(compute, [&found, begin, flat] {
      std::ranges::copy(flat, found.begin() + static_cast<std::ptrdiff_t>(begin));
      for (std::byte& each : flat) each = ~each;
    });
    compute.synchronize();
  }
  for (const Unit& unit : rank.engine().weights().units()) {
    device.enqueue(compute, [flat = rank.gatherer().flat(unit.id)] {
      for (std::byte& each : flat) each = ~each;
    });
  }
  compute.synchronize();
  return found;
}

// A script writes weights that stay whole, after it has asked for them or a forward has ended.
// Peers are still copying this rank's slices of them.
TEST(LateStepOptions, PeersGetTheWeightsOfTheStepWhateverIsWrittenAfterIt) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  std::vector<std::vector<std::byte>> found(2);  // by rank
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 2;
    options.can_await = true;
    options.device = comm::conformance::late_device(r);
    auto& device = static_cast<device::LateDevice&>(*options.device);
    FakeRank rank(model, options, joined(std::move(collectives), Over::kLatePeers, options.device));
    for (int step = 0; step < kSteps; ++step) {
      rank.forward();
      add_all(rank, all_gradients(model, step, 0, r), {}, true);
      if (r == step % 2) {
        device.enqueue(*rank.collectives().stream(comm::Traffic::kGathers), [] {
          volatile std::uint64_t sum = 0;
          for (std::uint64_t i = 0; i < 3'000'000; ++i) sum = sum + i;
        });
      }
      rank.engine().step(groups_of(step), 1.0, false);
      if (step % 2 == 0) {
        for (int unit = 0; unit < 9; ++unit) rank.gatherer().complete(unit);
      } else {
        for (int unit = 0; unit < 9; ++unit) {
          rank.gatherer().acquire(unit);
          rank.gatherer().release(unit);
        }
        rank.gatherer().wait_for_readers();
      }
      found[static_cast<std::size_t>(r)] = write_for_a_while(rank, device);
      rank.collectives().barrier();
      EXPECT_EQ(found[0], found[1]) << "step " << step;
      rank.collectives().barrier();
    }
  }));
}

// Whole units arrive late: the lazy all-gather of a unit that a rank does not use has not ended
// when the next step begins.
TEST(LateStepOptions, BringsAUnitAnewThatNobodyHasAskedForSince) {
  constexpr int kWorld = 2;
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const Script script = script_of_own_blocks(model, kWorld);
  expect_no_errors(run_ranks(kWorld, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    ReferenceStep reference(model, kWorld, {});
    RankOptions options;
    options.engine.stage = 2;
    options.can_await = true;
    options.device = comm::conformance::late_device(r);
    options.runs = [&](const plan::ScopeSpec& scope) { return script.runs(scope, r); };
    FakeRank rank(model, options, joined(std::move(collectives), Over::kLatePeers, options.device));
    for (int step = 0; step < 2 * kSteps; ++step) {
      rank.forward();
      const auto gradients = [&](int i) { return script.gradients(step, 0, i); };
      add_all(rank, gradients(r), {}, true);
      rank.engine().step(groups_of(step), 1.0, false);
      reference.add({gradients(0), gradients(1)}, true);
      reference.step(groups_of(step), 1.0);
    }
    expect_same_weights(rank, reference);
  }));
}

TEST(LateShardGroups, HaveTheBitsOfThePlainLoopOnEveryReplica) {
  plan::PlanOptions persistent;
  persistent.persistence_threshold = Numel(17);
  const FakeModel model(small_builder(DType::kBFloat16), persistent);
  using enum comm::Slices;
  for (const Groups& groups : std::vector<Groups>{{4, 2, false, kReplicated, true},
                                                  {6, 3, false, kReplicated, true},
                                                  {4, 2, false, kSecondary, true}}) {
    for (const int accumulation : {1, 3}) {
      GroupCase c{groups, accumulation, {}, 1.0, true, nullptr};
      c.engine.gradient_clipping = 0.25;
      expect_bits_of_reference(model, c);
      if (accumulation == 1) continue;
      c.engine.stage = 2;
      c.engine.max_reducing = 1_KiB;
      expect_bits_of_reference(model, c);
    }
  }
}

}  // namespace
}  // namespace strata::engine::fake
