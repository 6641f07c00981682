// The engine's whole step against the plain one of reference_step.h, bit for bit.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "engine/core/training_step_cases.h"
#include "kernels/references.h"
#include "strata/engine/optimize/external_optimizer.h"

namespace strata::engine::fake {
namespace {

class TrainingStep : public ::testing::TestWithParam<int> {};

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopAtEveryWorldSize) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(small_builder(dtype));
    for (int world = 1; world <= 4; ++world) {
      for (const int accumulation : {1, 4}) {
        Case c{dtype, world, accumulation, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0};
        c.options.engine.stage = GetParam();
        c.options.engine.gradient_clipping = world % 2 == 0 ? 0.25 : 0.0;
        expect_bits_of_reference(model, c, plain_script(model));
      }
    }
  }
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWhenGradientsAreReducedAtTheBoundary) {
  const FakeModel model(small_builder(DType::kBFloat16));
  for (int world = 1; world <= 4; ++world) {
    Case c{DType::kBFloat16, world, 4, {}, 1.0};
    c.options.engine.stage = GetParam();
    c.options.engine.reduce_at_boundary = true;
    expect_bits_of_reference(model, c, plain_script(model));
  }
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWhereABlockHasSeveralDTypes) {
  const FakeModel model(mixed_builder());
  for (const Over over : {Over::kThreads, Over::kPeers}) {
    for (int world = 1; world <= 3; ++world) {
      for (const bool at_boundary : {false, true}) {
        Case c{DType::kFloat32, world, 3, {}, 1.0, over};
        c.options.engine.stage = GetParam();
        c.options.engine.reduce_at_boundary = at_boundary;
        c.options.engine.gradient_clipping = 0.25;
        expect_bits_of_reference(model, c, plain_script(model));
      }
    }
  }
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWithinSmallBounds) {
  const FakeModel model(small_builder(DType::kFloat32));
  Case c{DType::kFloat32, 3, 2, {}, 1.0};
  c.options.engine.stage = GetParam();
  c.options.engine.max_live = 1_B;      // only units in use
  c.options.engine.max_reducing = 1_B;  // every reduction waits for the last one
  expect_bits_of_reference(model, c, plain_script(model));
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWhereWholeWeightsComeBesideTheNextForward) {
  plan::PlanOptions persistent;
  persistent.persistence_threshold = Numel(17);
  const FakeModel model(small_builder(DType::kBFloat16), persistent);
  for (const int world : {1, 2, 3}) {
    for (const bool can_await : {true, false}) {
      Case c{DType::kBFloat16, world, 2, {}, 1.0};
      c.options.engine.stage = GetParam();
      c.options.engine.gather_lazily = true;
      c.options.can_await = can_await;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWhereNobodyWaitsForTheNorm) {
  const FakeModel model(small_builder(DType::kBFloat16));
  for (const int world : {1, 2, 3}) {
    for (const double clipping : {0.0, 0.25}) {
      for (const Over over : {Over::kPeers, Over::kPeersGather, Over::kPeersReduce}) {
        Case c{DType::kBFloat16, world, 2, {}, 1.0, over};
        c.options.engine.stage = GetParam();
        c.options.engine.gradient_clipping = clipping;
        c.options.engine.late_norm = true;
        expect_bits_of_reference(model, c, plain_script(model));
      }
    }
  }
}

TEST_P(TrainingStep, HasTheBitsOfThePlainLoopWhereGathersAndReductionsAreCarriedApart) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(small_builder(dtype));
    for (const Over over : {Over::kPeersGather, Over::kPeersReduce}) {
      Case c{dtype, 3, 2, {}, 1.0, over};
      c.options.engine.stage = GetParam();
      c.options.engine.gradient_clipping = 0.25;
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, TrainingStep, ::testing::Values(0, 1, 2, 3),
                         [](const auto& stage) { return fmt::format("Stage{}", stage.param); });

TEST(TrainingStepOptions, ReducesInANarrowDTypeAndSumsWhereAsked) {
  const FakeModel model(small_builder(DType::kFloat32));
  Case c{DType::kFloat32, 3, 2, {}, 1.0};
  c.options.engine.reduce_dtype = DType::kBFloat16;
  c.options.engine.sum_gradients = true;
  c.options.rule = UpdateRule::kAdam;
  expect_bits_of_reference(model, c, plain_script(model));
}

TEST(TrainingStepOptions, KeepsPersistentUnitsWhole) {
  plan::PlanOptions options;
  options.persistence_threshold = Numel(17);
  const FakeModel model(small_builder(DType::kBFloat16), options);
  expect_bits_of_reference(model, {DType::kBFloat16, 3, 2, {}, 1.0}, plain_script(model));
}

TEST(TrainingStepOrder, MayDifferOnEveryRankAndInEveryPass) {
  const FakeModel model(small_builder(DType::kFloat32));
  Script script = plain_script(model);
  script.arrival = [&](int step, int micro, int rank) {
    std::vector<int> order(model.params.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(static_cast<unsigned>((step * 4 + micro) * 8 + rank));
    std::shuffle(order.begin(), order.end(), random);
    return order;
  };
  Case c{DType::kFloat32, 3, 2, {}, 1.0};
  expect_bits_of_reference(model, c, script);
  // The engine now reduces units before they are complete, and late gradients by themselves: the
  // same bits, since halves of these gradients add up exactly.
  c.world = 2;
  c.options.engine.max_reducing = 1_KiB;
  expect_bits_of_reference(model, c, script);
}

TEST(TrainingStepOrder, AParameterUnusedOnOneRankContributesZeroes) {
  const FakeModel model(small_builder(DType::kFloat32));
  Script script = plain_script(model);
  script.gradients = [&](int step, int micro, int rank) {
    Gradients gradients = all_gradients(model, step, micro, rank);
    // Rank 1 lacks a gradient in every step, rank 2 in step 1, and all ranks lack one in step 2.
    if (rank == 1) gradients[1].reset();
    if (rank == 2 && step == 1) gradients[5].reset();
    if (step == 2) gradients[0].reset();
    return gradients;
  };
  for (int stage : {0, 3}) {
    Case c{DType::kFloat32, 3, 1, {}, 1.0};
    c.options.engine.stage = stage;
    expect_bits_of_reference(model, c, script);
  }
}

TEST(TrainingStepOrder, AGradientThatComesAfterItsUnitWasReducedStillCounts) {
  const FakeModel model(small_builder(DType::kFloat32));
  const int late = 1;
  expect_no_errors(run_ranks(3, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    ReferenceStep reference(model, 3, {});
    FakeRank rank(model, {}, std::move(collectives));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Gradients> by_rank;
      std::vector<Gradients> late_by_rank;
      for (int i = 0; i < 3; ++i) {
        by_rank.push_back(all_gradients(model, step, 0, i));
        late_by_rank.emplace_back(model.params.size());
        // One rank only, and not in the first pass, in which the engine learns which gradients
        // come.
        if (i == 1 && step > 0) late_by_rank.back()[late] = noises(77, model.numel(late));
      }
      rank.forward();
      rank.engine().begin_backward(true);
      for (int p = model.count(); p-- > 0;) {
        const auto& gradient = by_rank[static_cast<std::size_t>(r)][static_cast<std::size_t>(p)];
        if (gradient) rank.add(p, *gradient);
      }
      const auto& extra = late_by_rank[static_cast<std::size_t>(r)][late];
      if (extra) rank.add(late, *extra);
      rank.engine().end_backward();
      reference.add(by_rank, true);
      if (step == 1) reference.add(late_by_rank, true);
      if (step == 2) {
        // By now the rank waits for the second one, so that both go out together.
        reference.forget();
        for (auto& gradients : {by_rank, late_by_rank}) reference.add(gradients, false);
        reference.add(std::vector<Gradients>(3, Gradients(model.params.size())), true);
      }
      const double norm = reference.step(groups_of(step), 1.0);
      ASSERT_EQ(rank.engine().step(groups_of(step), 1.0, false).grad_norm, norm);
      expect_same_weights(rank, reference);
    }
  }));
}

TEST(TrainingStepOrder, GradientsKeptOnTheRankGoOutWithTheNextReductionOrAtTheStep) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const bool last_is_synchronised : {true, false}) {
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      ReferenceStep reference(model, 2, {});
      FakeRank rank(model, {}, std::move(collectives));
      for (int micro = 0; micro < 2; ++micro) {
        const std::vector<Gradients> by_rank{all_gradients(model, 0, micro, 0),
                                             all_gradients(model, 0, micro, 1)};
        rank.forward();
        rank.backward(
            false,
            [&](int p) {
              rank.add(p, *by_rank[static_cast<std::size_t>(r)][static_cast<std::size_t>(p)]);
            },
            micro == 1 && last_is_synchronised);
        reference.add(by_rank, micro == 1);
      }
      const double norm = reference.step(groups_of(0), 1.0);
      ASSERT_EQ(rank.engine().step(groups_of(0), 1.0, false).grad_norm, norm);
      expect_same_weights(rank, reference);
    }));
  }
}

TEST(TrainingStepOrder, GradientsThatAreDroppedLeaveNothingBehind) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const bool at_boundary : {false, true}) {
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      ReferenceStep reference(model, 2, {});
      RankOptions options;
      options.engine.reduce_at_boundary = at_boundary;
      FakeRank rank(model, options, std::move(collectives));
      const auto pass = [&](int micro, bool boundary) {
        const Gradients mine = all_gradients(model, 0, micro, r);
        rank.forward();
        add_all(rank, mine, {}, boundary);
      };
      pass(0, false);
      rank.engine().zero_gradients();
      pass(1, true);
      reference.add({all_gradients(model, 0, 1, 0), all_gradients(model, 0, 1, 1)}, true);
      const double norm = reference.step(groups_of(0), 1.0);
      ASSERT_EQ(rank.engine().step(groups_of(0), 1.0, false).grad_norm, norm);
      expect_same_weights(rank, reference);
    }));
  }
}

// The mean of the ranks' gradients of a parameter, as the shards keep it.
Values mean_gradient(const FakeModel& model, int param, int world, DType kept_in) {
  std::vector<Values> all;
  std::vector<const std::byte*> sources;
  for (int r = 0; r < world; ++r)
    all.push_back(*all_gradients(model, 0, 0, r)[static_cast<std::size_t>(param)]);
  for (const Values& v : all) sources.push_back(reinterpret_cast<const std::byte*>(v.data()));
  Values mean(all.front().size());
  kernels::sum_in_order_reference(mean, sources, DType::kFloat32, 1.0F / static_cast<float>(world),
                                  false);
  const std::vector<std::byte> kept = rounded(mean, kept_in);
  kernels::cast_reference(reinterpret_cast<std::byte*>(mean.data()), DType::kFloat32, kept.data(),
                          kept_in, Numel(mean.size()));
  return mean;
}

class TrainingStepExternal : public ::testing::TestWithParam<std::tuple<DType, DType>> {};

TEST_P(TrainingStepExternal, AUsersOptimizerSeesScaledGradientsAndItsMastersAreRounded) {
  const auto [dtype, kept_in] = GetParam();
  const FakeModel model(small_builder(dtype));
  const auto unused = [&](int p) {
    return model.params[static_cast<std::size_t>(p)].name.starts_with("layers.1.");
  };
  expect_no_errors(run_ranks(3, [&, kept_in = kept_in, dtype = dtype](
                                    int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kExternal;
    options.engine.gradient_clipping = 0.5;
    options.engine.accumulation_dtype = kept_in;
    FakeRank rank(model, options, std::move(collectives));
    auto* external = dynamic_cast<ExternalOptimizer*>(rank.engine().optimizer());
    ASSERT_NE(external, nullptr);
    external->set_update([&](std::span<const std::span<float>> gradients) {
      ASSERT_EQ(gradients.size(), external->segments().size());
      for (std::size_t s = 0; s < gradients.size(); ++s) {
        const std::span<float> weight = external->segments()[s].weight;
        if (gradients[s].empty()) continue;  // of those that are unused
        ASSERT_EQ(gradients[s].size(), weight.size());
        for (std::size_t i = 0; i < weight.size(); ++i) {
          const float move = 0.5F * gradients[s][i];
          weight[i] -= move;
        }
      }
    });
    rank.forward();
    Gradients mine = all_gradients(model, 0, 0, r);
    for (int p = 0; p < model.count(); ++p) {
      if (unused(p)) mine[static_cast<std::size_t>(p)].reset();
    }
    add_all(rank, mine, {}, true);
    const double norm = rank.engine().step({}, 2.0, false).grad_norm.value();
    const auto scale = static_cast<float>(0.5 * std::min(1.0, 0.5 / (norm + 1e-6)));
    for (int p = 0; p < model.count(); ++p) {
      Values wanted = model.initial(p);
      if (model.params[static_cast<std::size_t>(p)].trainable && !unused(p)) {
        const Values mean = mean_gradient(model, p, 3, kept_in);
        for (std::size_t i = 0; i < wanted.size(); ++i) {
          const float gradient = scale * mean[i];
          const float move = 0.5F * gradient;
          wanted[i] -= move;
        }
      }
      ASSERT_EQ(rank.weight(p), rounded(wanted, dtype)) << "parameter " << p;
    }
  }));
}

TEST(TrainingStepExternalWithout, AGradientIsEmptyAndItsWeightsStay) {
  const FakeModel model(small_builder(DType::kBFloat16));
  expect_no_errors(run_ranks(2, [&](int, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kExternal;
    options.engine.reduce_at_boundary = true;
    FakeRank rank(model, options, std::move(collectives));
    auto* external = dynamic_cast<ExternalOptimizer*>(rank.engine().optimizer());
    std::size_t empty = 0;
    external->set_update([&](std::span<const std::span<float>> gradients) {
      empty = static_cast<std::size_t>(std::ranges::count_if(
          gradients, [](std::span<float> gradient) { return gradient.empty(); }));
    });
    rank.forward();
    add_all(rank, Gradients(model.params.size()), {}, /*boundary=*/false);
    rank.engine().step({}, 1.0, false);
    EXPECT_EQ(empty, external->segments().size());
    EXPECT_GT(empty, 0U);
    for (int p = 0; p < model.count(); ++p)
      EXPECT_EQ(rank.weight(p), rounded(model.initial(p), DType::kBFloat16)) << p;
  }));
}

INSTANTIATE_TEST_SUITE_P(DTypes, TrainingStepExternal,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16)),
                         [](const auto& dtypes) {
                           return fmt::format("{}GradientsIn{}", name_of(std::get<0>(dtypes.param)),
                                              name_of(std::get<1>(dtypes.param)));
                         });

}  // namespace
}  // namespace strata::engine::fake
