// Parameters that no rank gave a gradient in a step, against the plain loop, which updates each
// parameter by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/core/training_step_cases.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/reduce/gradient_check.h"

namespace strata::engine::fake {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A parameter may be without a gradient everywhere, on some ranks, or in some micro-steps; now and
// then all of a unit are.
Script script_with_gaps(const FakeModel& model) {
  Script script;
  script.gradients = [&model](int step, int micro, int rank) {
    Gradients gradients = all_gradients(model, step, micro, rank);
    for (int p = 0; p < model.count(); ++p) {
      const bool nowhere = (p + step) % 3 == 0;
      const bool not_here = (p + rank + micro) % 4 == 0;
      const bool block =
          step == 1 && model.params[static_cast<std::size_t>(p)].name.starts_with("layers.1.");
      if (nowhere || not_here || block) gradients[static_cast<std::size_t>(p)].reset();
    }
    return gradients;
  };
  return script;
}

class UnusedParameters : public ::testing::TestWithParam<int> {};

TEST_P(UnusedParameters, StayAsTheyAreWithTheBitsOfThePlainLoop) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(small_builder(dtype));
    for (const int world : {1, 2, 3}) {
      for (const bool late : {false, true}) {
        Case c{dtype, world, 1 + world % 2, {}, 1.0, late ? Over::kPeers : Over::kThreads};
        c.options.engine.stage = GetParam();
        c.options.engine.late_norm = late;
        c.options.engine.gradient_clipping = 0.25;
        c.options.engine.reduce_at_boundary = dtype == DType::kBFloat16 && world == 3;
        c.options.rule = world == 2 ? UpdateRule::kAdam : UpdateRule::kAdamW;
        expect_bits_of_reference(model, c, script_with_gaps(model));
      }
    }
  }
}

TEST_P(UnusedParameters, DecayWhereTheConfigurationAsksForIt) {
  const FakeModel model(small_builder(DType::kBFloat16));
  for (const bool late : {false, true}) {
    Case c{DType::kBFloat16, 2, 2, {}, 1.0, late ? Over::kPeers : Over::kThreads};
    c.options.engine.stage = GetParam();
    c.options.engine.late_norm = late;
    c.options.engine.decay_unused = true;
    expect_bits_of_reference(model, c, script_with_gaps(model));
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, UnusedParameters, ::testing::Values(0, 1, 2, 3),
                         [](const auto& stage) { return fmt::format("Stage{}", stage.param); });

// A gradient that comes after its unit was reduced, and on one rank alone, is one all the same.
TEST(UnusedParametersLate, AreNotThoseWhoseGradientCameLate) {
  const FakeModel model(small_builder(DType::kFloat32));
  const int late = 1;
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    ReferenceStep reference(model, 2, {});
    RankOptions options;
    options.engine.late_norm = true;
    FakeRank rank(model, options, joined(std::move(collectives), Over::kPeers));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Gradients> by_rank{all_gradients(model, step, 0, 0),
                                     all_gradients(model, step, 0, 1)};
      by_rank[0][late].reset();
      if (step != 1) by_rank[1][late].reset();
      rank.forward();
      rank.engine().begin_backward(true);
      // In the first passes the engine does not expect this gradient: it reduces the unit without.
      for (int p = model.count(); p-- > 0;) {
        const auto& gradient = by_rank[static_cast<std::size_t>(r)][static_cast<std::size_t>(p)];
        if (gradient && p != late) rank.add(p, *gradient);
      }
      const auto& gradient = by_rank[static_cast<std::size_t>(r)][late];
      if (gradient) rank.add(late, *gradient);
      rank.engine().end_backward();
      reference.add(by_rank, true);
      reference.step(groups_of(step), 1.0);
      rank.engine().step(groups_of(step), 1.0, false);
      expect_same_weights(rank, reference);
    }
  }));
}

TEST(UnusedParametersSkipped, AStepThatTheDeviceSkippedCountsForNoParameter) {
  const FakeModel model(small_builder(DType::kBFloat16));
  const Script script = script_with_gaps(model);
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    ReferenceStep reference(model, 2, {});
    RankOptions options;
    options.engine.late_norm = true;
    FakeRank rank(model, options, joined(std::move(collectives), Over::kPeers));
    for (int step = 0; step < 2 * kSteps; ++step) {
      std::vector<Gradients> by_rank{script.gradients(step, 0, 0), script.gradients(step, 0, 1)};
      for (auto& gradient : by_rank[1]) {
        if (gradient && !gradient->empty() && step % 2 == 1)
          gradient->back() = std::numeric_limits<float>::quiet_NaN();
      }
      rank.forward();
      add_all(rank, by_rank[static_cast<std::size_t>(r)], {}, true);
      reference.add(by_rank, true);
      reference.step(groups_of(step), 1.0);
      rank.engine().step(groups_of(step), 1.0, false);
      EXPECT_EQ(rank.engine().gradient_check().last_applied(), step % 2 == 0);
      expect_same_weights(rank, reference);
    }
    EXPECT_EQ(rank.engine().gradient_check().skipped_steps(true), kSteps);
    EXPECT_EQ(rank.engine().optimizer()->steps(), kSteps + 1) << "the last one is not settled yet";
  }));
}

TEST(UnusedParametersExternal, HaveNoGradientForAUsersOptimizer) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(run_ranks(3, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kExternal;
    FakeRank rank(model, options, std::move(collectives));
    auto* external = dynamic_cast<ExternalOptimizer*>(rank.engine().optimizer());
    ASSERT_NE(external, nullptr);
    external->set_update([&](std::span<const std::span<float>> gradients) {
      for (std::size_t s = 0; s < gradients.size(); ++s) {
        // This optimizer adds 1 to each weight for which it gets a gradient.
        if (gradients[s].empty()) continue;
        for (float& weight : external->segments()[s].weight) weight += 1.0F;
      }
    });
    Gradients mine = all_gradients(model, 0, 0, r);
    for (const int nowhere : {1, 4}) mine[static_cast<std::size_t>(nowhere)].reset();
    if (r != 2) mine[5].reset();
    rank.forward();
    add_all(rank, mine, {}, true);
    rank.engine().step({}, 1.0, false);
    for (int p = 0; p < model.count(); ++p) {
      Values wanted = model.initial(p);
      const bool moves = model.params[static_cast<std::size_t>(p)].trainable && p != 1 && p != 4;
      for (float& value : wanted) value += moves ? 1.0F : 0.0F;
      ASSERT_EQ(rank.weight(p), rounded(wanted, DType::kFloat32)) << "parameter " << p;
    }
  }));
}

}  // namespace
}  // namespace strata::engine::fake
