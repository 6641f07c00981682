// The engine's step where weights, gradients and states are sharded inside groups of ranks: against
// the plain step of reference_step.h, bit for bit, and the same on all replicas.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "comm/collective_network.h"
#include "comm/grouped_ranks.h"
#include "engine/core/fake_model.h"
#include "engine/core/reference_step.h"
#include "engine/core/training_step_cases.h"

namespace strata::engine::fake {
namespace {

constexpr int kSteps = 3;

struct Groups {
  int world = 4;
  int size = 2;
  bool network = false;  // between them; else replicas read each other's memory
  comm::Slices slices = comm::Slices::kReplicated;
};

std::vector<std::string> run_groups(const Groups& groups, const Body& body) {
  comm::CommOptions options;
  options.timeout = std::chrono::seconds(60);
  comm::conformance::GroupedRanks ranks(groups.world, groups.size, options, groups.slices);
  if (groups.network) {
    ranks.set_network([](auto across, comm::RankNames names) {
      return std::make_unique<comm::conformance::CollectiveNetwork>(std::move(across), names);
    });
  }
  std::vector<std::string> errors(static_cast<std::size_t>(groups.world));
  std::vector<std::thread> threads;
  for (int r = 0; r < groups.world; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r, ranks.rank(r));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<GroupScalars> scalars() {
  std::vector<GroupScalars> groups(3);
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].lr = 1e-2 * static_cast<double>(g + 1);
  return groups;
}

// Weights and masters of this rank's shards, as bytes.
std::string shards_of(FakeRank& rank) {
  std::string result;
  const auto add = [&](std::span<const std::byte> bytes) {
    result.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  Weights& weights = rank.engine().weights();
  for (const Unit& unit : weights.units()) {
    add(unit.shard);
    if (unit.trainable()) add(weights.lease_master(unit.id)->bytes());
  }
  return result;
}

void expect_same_replicas(FakeRank& rank) {
  const comm::ShardPlace place = rank.collectives().shard_place();
  const std::string mine = shards_of(rank);
  const std::vector<std::string> all = rank.collectives().all_gather_text(mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (static_cast<int>(r) % place.count != place.index) continue;
    EXPECT_TRUE(all[r] == mine) << r;
  }
}

struct Case {
  Groups groups;
  int accumulation = 1;
  EngineOptions engine;
  double loss_scale = 1.0;
  bool shuffled = false;  // gradients arrive in another order on every rank
  std::function<Gradients(int step, int micro, int rank)> gradients;
};

void backward(FakeRank& rank, const Case& c, int pass, int r, const Gradients& mine,
              bool boundary) {
  std::vector<int> order(mine.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::mt19937 random(static_cast<unsigned>(pass * 8 + r));
  if (c.shuffled) std::shuffle(order.begin(), order.end(), random);
  rank.engine().begin_backward(boundary);
  for (const int p : order) {
    const auto& gradient = mine[static_cast<std::size_t>(p)];
    if (gradient) rank.add(p, *gradient);
  }
  rank.engine().end_backward();
}

void expect_bits_of_reference(const FakeModel& model, const Case& c) {
  SCOPED_TRACE(fmt::format("world {} groups of {} network {} stage {} accumulation {}",
                           c.groups.world, c.groups.size, c.groups.network, c.engine.stage,
                           c.accumulation));
  ReferenceOptions plain;
  plain.reduce_dtype = c.engine.reduce_dtype;
  plain.sum = c.engine.sum_gradients;
  plain.clipping = c.engine.gradient_clipping;
  plain.group_size = c.groups.size;
  const bool secondary = c.groups.slices == comm::Slices::kSecondary;
  plain.groups_at_once = secondary;
  expect_no_errors(run_groups(c.groups, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    ReferenceStep reference(model, c.groups.world, plain);
    RankOptions options;
    options.engine = c.engine;
    FakeRank rank(model, options, std::move(ranks));
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < c.accumulation; ++micro) {
        const bool boundary = micro + 1 == c.accumulation;
        std::vector<Gradients> by_rank;
        for (int i = 0; i < c.groups.world; ++i) {
          by_rank.push_back(c.gradients ? c.gradients(step, micro, i)
                                        : all_gradients(model, step, micro, i));
        }
        rank.forward();
        backward(rank, c, step * c.accumulation + micro, r, by_rank[static_cast<std::size_t>(r)],
                 boundary);
        reference.add(by_rank, boundary || !c.engine.reduce_at_boundary);
      }
      const double norm = reference.step(scalars(), c.loss_scale);
      const StepResult result = rank.engine().step(scalars(), c.loss_scale, false);
      // Secondary slices are smaller: the sum of squares is taken in another order.
      ASSERT_NEAR(result.grad_norm.value(), norm, secondary ? 1e-13 * norm : 0.0)
          << "step " << step;
      for (int p = 0; p < model.count(); ++p) {
        ASSERT_EQ(rank.weight(p), reference.weight(p))
            << model.params[static_cast<std::size_t>(p)].name;
      }
      rank.collectives().barrier();
      if (!secondary) expect_same_replicas(rank);
    }
  }));
}

TEST(ShardGroups, HaveTheBitsOfThePlainLoopOnEveryReplica) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(small_builder(dtype));
    for (const Groups& groups : std::vector<Groups>{{2, 1, false},
                                                    {4, 2, false},
                                                    {4, 2, true},
                                                    {4, 1, true},
                                                    {6, 3, false},
                                                    {6, 2, true}}) {
      for (const int accumulation : {1, 3}) {
        Case c{groups, accumulation, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0, false, nullptr};
        c.engine.gradient_clipping = 0.25;
        expect_bits_of_reference(model, c);
      }
    }
  }
}

TEST(ShardGroups, HaveThemWhereWeightsStayWholeOrGradientsUntilTheBoundary) {
  plan::PlanOptions persistent;
  persistent.persistence_threshold = Numel(17);
  const FakeModel model(small_builder(DType::kBFloat16), persistent);
  for (const int stage : {1, 3}) {
    Case c{{4, 2, true}, 2, {}, 1.0, false, nullptr};
    c.engine.stage = stage;
    expect_bits_of_reference(model, c);
    c.engine.reduce_at_boundary = true;
    expect_bits_of_reference(model, c);
  }
}

TEST(ShardGroups, HaveThemWhereEachRankOwnsAPartOfWhatItHolds) {
  plan::PlanOptions persistent;
  persistent.persistence_threshold = Numel(17);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& options : {plan::PlanOptions(), persistent}) {
      const FakeModel model(small_builder(dtype), options);
      for (const Groups& groups : std::vector<Groups>{{4, 2, false, comm::Slices::kSecondary},
                                                      {4, 2, true, comm::Slices::kSecondary},
                                                      {6, 3, true, comm::Slices::kSecondary},
                                                      {2, 1, false, comm::Slices::kSecondary}}) {
        for (const int accumulation : {1, 3})
          expect_bits_of_reference(model, {groups, accumulation, {}, 1.0, false, nullptr});
      }
    }
  }
}

TEST(ShardGroups, HaveThemWhateverTheOrderOfGradientsOnEachRank) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const bool network : {false, true}) {
    Case c{{4, 2, network}, 2, {}, 1.0, true, nullptr};
    expect_bits_of_reference(model, c);
    // Buffers are needed again while reductions run, at other moments on each rank.
    c.engine.max_reducing = 1_KiB;
    expect_bits_of_reference(model, c);
  }
}

TEST(ShardGroups, CountAParameterThatOneRankDidNotUseAsZero) {
  const FakeModel model(small_builder(DType::kFloat32));
  Case c{{4, 2, true}, 2, {}, 1.0, false, nullptr};
  c.gradients = [&](int step, int micro, int rank) {
    Gradients gradients = all_gradients(model, step, micro, rank);
    if (rank == 1) gradients[1].reset();
    if (rank == 3 && step == 1) gradients[5].reset();
    return gradients;
  };
  expect_bits_of_reference(model, c);
}

TEST(ShardGroups, AddUpOverGroupsAtAStepThatNoLastPassPrepared) {
  const FakeModel model(small_builder(DType::kFloat32));
  ReferenceOptions plain;
  plain.group_size = 2;
  expect_no_errors(run_groups({4, 2, true}, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    ReferenceStep reference(model, 4, plain);
    FakeRank rank(model, {}, std::move(ranks));
    std::vector<Gradients> by_rank;
    for (int i = 0; i < 4; ++i) by_rank.push_back(all_gradients(model, 0, 0, i));
    rank.forward();
    backward(rank, {}, 0, r, by_rank[static_cast<std::size_t>(r)], /*boundary=*/false);
    reference.add(by_rank, true);
    const double norm = reference.step(scalars(), 1.0);
    ASSERT_EQ(rank.engine().step(scalars(), 1.0, false).grad_norm, norm);
    for (int p = 0; p < model.count(); ++p) ASSERT_EQ(rank.weight(p), reference.weight(p));
    rank.collectives().barrier();
  }));
}

TEST(ShardGroups, DropGradientsOfTheirGroupsWithTheOthers) {
  const FakeModel model(small_builder(DType::kFloat32));
  ReferenceOptions plain;
  plain.group_size = 1;
  expect_no_errors(run_groups({2, 1, false}, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    ReferenceStep reference(model, 2, plain);
    FakeRank rank(model, {}, std::move(ranks));
    rank.forward();
    backward(rank, {}, 0, r, all_gradients(model, 0, 0, r), /*boundary=*/false);
    rank.engine().zero_gradients();
    rank.forward();
    backward(rank, {}, 1, r, all_gradients(model, 0, 1, r), /*boundary=*/true);
    reference.add({all_gradients(model, 0, 1, 0), all_gradients(model, 0, 1, 1)}, true);
    const double norm = reference.step(scalars(), 1.0);
    ASSERT_EQ(rank.engine().step(scalars(), 1.0, false).grad_norm, norm);
    rank.collectives().barrier();
  }));
}

TEST(ShardGroups, HoldASliceOfTheirGroupOnly) {
  const FakeModel model(small_builder(DType::kBFloat16));
  Bytes of_two;
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    FakeRank rank(model, {}, std::move(ranks));
    if (r == 0) of_two = rank.ledger().held(memory::Tier::kDevice, memory::Kind::kWeights);
  }));
  expect_no_errors(run_groups({4, 2, false}, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    FakeRank rank(model, {}, std::move(ranks));
    EXPECT_EQ(rank.ledger().held(memory::Tier::kDevice, memory::Kind::kWeights), of_two);
  }));
}

TEST(ShardGroups, OwnStatesOfTheWorldWhereSlicesAreSecondary) {
  const FakeModel model(small_builder(DType::kBFloat16));
  Bytes weights_of_two;
  Bytes masters_of_four;
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    FakeRank rank(model, {}, std::move(ranks));
    if (r == 0) weights_of_two = rank.ledger().held(memory::Tier::kDevice, memory::Kind::kWeights);
  }));
  expect_no_errors(run_ranks(4, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    FakeRank rank(model, {}, std::move(ranks));
    if (r == 0)
      masters_of_four = rank.ledger().held(memory::Tier::kDevice, memory::Kind::kMasterWeights);
  }));
  const Groups groups{4, 2, false, comm::Slices::kSecondary};
  expect_no_errors(run_groups(groups, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    FakeRank rank(model, {}, std::move(ranks));
    const memory::Ledger& ledger = rank.ledger();
    EXPECT_EQ(ledger.held(memory::Tier::kDevice, memory::Kind::kMasterWeights), masters_of_four);
    // Slices are padded to pages, and more so where they are cut for more owners.
    EXPECT_LE(ledger.held(memory::Tier::kDevice, memory::Kind::kWeights),
              weights_of_two + Bytes(4096) * static_cast<std::int64_t>(model.plan.units.size()));
  }));
}

TEST(ShardGroups, NameTheRankWhoseGradientsAreNotFiniteByItsPlaceInTheWorld) {
  const FakeModel model(small_builder(DType::kFloat32));
  const auto errors =
      run_groups({4, 2, true}, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
        FakeRank rank(model, {}, std::move(ranks));
        Gradients mine = all_gradients(model, 0, 0, r);
        if (r == 3) (*mine[0])[0] = std::numeric_limits<float>::quiet_NaN();
        rank.forward();
        backward(rank, {}, 0, r, mine, true);
        rank.engine().step(scalars(), 1.0, false);
      });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("are not finite"), std::string::npos) << error;
}

TEST(ShardGroups, EndOnEveryRankWhenOneLeaves) {
  const FakeModel model(small_builder(DType::kFloat32));
  const auto errors =
      run_groups({4, 2, false}, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
        FakeRank rank(model, {}, std::move(ranks));
        rank.forward();
        if (r == 3) throw UsageError("rank 3 ends here");
        backward(rank, {}, 0, r, all_gradients(model, 0, 0, r), true);
        rank.engine().step(scalars(), 1.0, false);
      });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("rank 3"), std::string::npos) << error;
}

}  // namespace
}  // namespace strata::engine::fake
