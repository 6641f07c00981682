// The engine's step where weights, gradients and states are sharded inside groups of ranks: against
// the plain step of reference_step.h, bit for bit, and the same on all replicas.
#include <gtest/gtest.h>

#include "engine/core/shard_group_cases.h"

namespace strata::engine::fake {
namespace {

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
        GroupCase c{groups, accumulation, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0,
                    false,  nullptr};
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
    GroupCase c{{4, 2, true}, 2, {}, 1.0, false, nullptr};
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
    GroupCase c{{4, 2, network}, 2, {}, 1.0, true, nullptr};
    expect_bits_of_reference(model, c);
    // Buffers are needed again while reductions run, at other moments on each rank.
    c.engine.max_reducing = 1_KiB;
    expect_bits_of_reference(model, c);
  }
}

TEST(ShardGroups, CountAParameterThatOneRankDidNotUseAsZero) {
  const FakeModel model(small_builder(DType::kFloat32));
  GroupCase c{{4, 2, true}, 2, {}, 1.0, false, nullptr};
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
        RankOptions options;
        options.engine.max_skipped_steps = 0;
        FakeRank rank(model, options, std::move(ranks));
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
