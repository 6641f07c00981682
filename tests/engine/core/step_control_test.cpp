#include "strata/engine/step_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const std::vector<GroupScalars> kGroups(3);

Config config_of(std::string_view text) {
  Config config = Config::parse(text);
  config.complete_batch(1);
  return config;
}

// One rank whose engine is driven through a StepControl.
struct Driven {
  explicit Driven(std::string_view text, DType dtype = DType::kFloat32, bool late_norm = false)
      : config(config_of(text)), model(small_builder(dtype)), group(1) {
    RankOptions options;
    options.engine = engine_options_from(config);
    options.engine.late_norm = late_norm;
    rank = std::make_unique<FakeRank>(model, options, group.rank(0));
    control = std::make_unique<StepControl>(rank->engine(), config);
  }

  void micro_step(float scale = 1.0F) {
    rank->forward();
    control->begin_backward();
    for (int p = 0; p < model.count(); ++p) {
      if (!model.params[static_cast<std::size_t>(p)].trainable) continue;
      Values gradient = noises(static_cast<std::uint64_t>(p), model.numel(p));
      for (float& value : gradient) value *= scale;
      rank->add(p, gradient);
    }
    control->end_backward();
  }

  Config config;
  FakeModel model;
  comm::LocalGroup group;
  std::unique_ptr<FakeRank> rank;
  std::unique_ptr<StepControl> control;
};

constexpr std::string_view kAccumulating =
    R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3})";

TEST(StepControl, CountsAnotherNumberOfMicroStepsFromTheChangeOn) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1})");
  for (const int steps : {1, 2, 3, 3, 2}) {
    d.control->set_accumulation_steps(steps);
    for (int i = 1; i <= steps; ++i) {
      d.micro_step();
      EXPECT_EQ(d.control->step(kGroups).has_value(), i == steps) << steps;
    }
  }
}

TEST(StepControl, UpdatesAtEveryAccumulationBoundary) {
  Driven d(kAccumulating);
  for (int i = 1; i <= 6; ++i) {
    EXPECT_EQ(d.control->at_boundary(), i % 3 == 0);
    d.micro_step();
    const auto before = d.rank->weight(0);
    const auto result = d.control->step(kGroups);
    EXPECT_EQ(result.has_value(), i % 3 == 0);
    EXPECT_EQ(d.rank->weight(0) != before, i % 3 == 0);
    EXPECT_EQ(d.control->micro_steps(), i);
    EXPECT_EQ(d.control->global_steps(), i / 3);
  }
  ASSERT_TRUE(d.control->grad_norm().has_value());
  EXPECT_GT(*d.control->grad_norm(), 0.0);
}

TEST(StepControl, TheBoundaryCanBeSetByHandAndLeftToTheCountAgain) {
  Driven d(kAccumulating);
  d.control->set_boundary(true);
  d.micro_step();
  EXPECT_TRUE(d.control->step(kGroups).has_value());
  d.control->set_boundary(false);
  for (int i = 0; i < 4; ++i) {
    d.micro_step();
    EXPECT_FALSE(d.control->step(kGroups).has_value());
  }
  d.control->set_boundary(std::nullopt);
  EXPECT_TRUE(d.control->at_boundary()) << "the sixth micro-step";
}

TEST(StepControl, ABoundaryThatIsSetAfterBackwardStillCountsWhatWasKept) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
               "strata": {"reduce_at": "boundary"}})");
  d.micro_step();
  d.control->set_boundary(true);
  const auto before = d.rank->weight(0);
  const auto result = d.control->step(kGroups);
  ASSERT_TRUE(result.has_value());
  EXPECT_GT(result->grad_norm, 0.0);
  EXPECT_NE(d.rank->weight(0), before);
}

TEST(StepControl, TheLossFactorIsTheLossScaleOverTheAccumulationSteps) {
  Driven plain(kAccumulating);
  EXPECT_EQ(plain.control->loss_factor(true), 1.0 / 3.0);
  EXPECT_EQ(plain.control->loss_factor(false), 1.0);
  Driven half(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
                  "fp16": {"enabled": true, "initial_scale_power": 8}})",
              DType::kFloat16);
  EXPECT_EQ(half.control->loss_factor(true), 64.0);
  EXPECT_EQ(half.control->loss_factor(false), 256.0);
  half.control->set_accumulation_steps(2);
  EXPECT_EQ(half.control->loss_factor(true), 128.0);
  EXPECT_THROW(half.control->set_accumulation_steps(0), UsageError);
}

TEST(StepControl, AnOverflowIsSkippedAndLowersTheLossScale) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1,
               "fp16": {"enabled": true, "initial_scale_power": 8, "hysteresis": 1}})",
           DType::kFloat16);
  const auto before = d.rank->weight(0);
  d.micro_step(1e6F);
  const auto skipped = d.control->step(kGroups);
  ASSERT_TRUE(skipped.has_value());
  EXPECT_FALSE(skipped->applied);
  EXPECT_EQ(d.control->skipped_steps(), 1);
  EXPECT_EQ(d.control->global_steps(), 1);
  EXPECT_EQ(d.control->loss_scaler().scale(), 128.0);
  EXPECT_EQ(d.rank->weight(0), before);
  d.micro_step();
  EXPECT_TRUE(d.control->step(kGroups)->applied);
  EXPECT_EQ(d.control->skipped_steps(), 1);
  EXPECT_EQ(d.control->global_steps(), 2);
}

TEST(StepControl, ANormDoesNotDependOnTheLossScale) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1,
               "fp16": {"enabled": true, "initial_scale_power": 8}})",
           DType::kFloat16);
  d.micro_step(256.0F);
  Driven plain(R"({"train_micro_batch_size_per_gpu": 1})");
  plain.micro_step();
  EXPECT_EQ(d.control->step(kGroups)->grad_norm, plain.control->step(kGroups)->grad_norm);
}

TEST(StepControl, AGradientThatIsNotFiniteIsAnErrorAtOnceWhereNoStepMayBeSkipped) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1, "strata": {"max_skipped_steps": 0}})");
  d.micro_step(kInfinity);
  EXPECT_THROW(d.control->step(kGroups), NumericsError);
  d.micro_step();
  EXPECT_TRUE(d.control->step(kGroups)->applied);
  EXPECT_EQ(d.control->skipped_steps(), 0);
  EXPECT_EQ(d.control->global_steps(), 1);
}

TEST(StepControl, InBf16StepsThatAreNotFiniteAreSkippedUnlessTheConfigurationLooksAway) {
  const auto applied = [](std::string_view text) {
    Driven d(text, DType::kBFloat16);
    d.micro_step(kInfinity);
    return d.control->step(kGroups)->applied;
  };
  EXPECT_FALSE(applied(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}})"));
  EXPECT_TRUE(applied(R"({"train_micro_batch_size_per_gpu": 1,
                          "bf16": {"enabled": true, "check_grad_overflow": false}})"));
}

// `late`: a step does not wait for the norm; the next step gets it.
void expect_skips(bool late) {
  Driven d(R"({"train_micro_batch_size_per_gpu": 1, "strata": {"max_skipped_steps": 2}})",
           DType::kFloat32, late);
  Driven clean(R"({"train_micro_batch_size_per_gpu": 1})");
  std::string warnings;
  const auto step = [&](float scale) {
    d.micro_step(scale);
    const std::optional<StepResult> result = d.control->step(kGroups);
    ASSERT_TRUE(result.has_value());
    warnings += result->warning;
    EXPECT_EQ(result->grad_norm.has_value(), !late);
    EXPECT_EQ(d.control->last_step_applied(), scale == 1.0F);
  };
  for (int series = 0; series < 2; ++series) {
    step(kInfinity);
    step(kInfinity);  // as many as may be
    EXPECT_EQ(d.control->skipped_steps(), 2 * series + 2);
    step(1.0F);
    clean.micro_step();
    clean.control->step(kGroups);
    for (int p = 0; p < d.model.count(); ++p) EXPECT_EQ(d.rank->weight(p), clean.rank->weight(p));
  }
  EXPECT_THAT(warnings, AllOf(HasSubstr("First found in: unit '"), HasSubstr("of rank 0")));
  EXPECT_EQ(warnings.find("First"), warnings.rfind("First")) << "it is said once: " << warnings;
  step(kInfinity);
  step(kInfinity);
  const auto too_many = [&] {
    d.micro_step(kInfinity);
    d.control->step(kGroups);
    d.micro_step();
    d.control->step(kGroups);
  };
  EXPECT_THAT([&] { too_many(); },
              ThrowsMessage<NumericsError>(AllOf(HasSubstr("after 2 steps in a row"),
                                                 HasSubstr("unit '"), HasSubstr("unchanged"))));
  EXPECT_EQ(d.control->global_steps() - d.control->skipped_steps(), 2) << "those that were applied";
  d.micro_step();
  EXPECT_TRUE(d.control->step(kGroups)->applied);
  EXPECT_EQ(d.rank->engine().optimizer()->steps(), 3);
}

TEST(StepControl, StepsThatAreNotFiniteAreSkippedAndCountedUntilTheyAreTooMany) {
  expect_skips(/*late=*/false);
}

TEST(StepControl, SoTheyAreWhereNobodyWaitsForTheNorm) {
  expect_skips(/*late=*/true);
}

TEST(StepControl, StepNeedsABackwardOfItsOwnMicroStep) {
  Driven d(kAccumulating);
  d.micro_step();
  d.control->step(kGroups);
  try {
    d.control->step(kGroups);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("step() was called without a backward pass"));
  }
  EXPECT_EQ(d.control->micro_steps(), 1) << "a refused call does not count";
}

TEST(StepControl, AMicroStepNeedsAForwardPassOfItsOwn) {
  Driven d(kAccumulating);
  d.micro_step();
  d.control->step(kGroups);
  EXPECT_THROW(d.control->begin_backward(), UsageError);
  d.micro_step();
}

TEST(StepControl, AnAbandonedBackwardIsNoMicroStep) {
  Driven d(kAccumulating);
  d.rank->forward();
  d.control->begin_backward();
  d.control->abandon_backward();
  EXPECT_THROW(d.control->step(kGroups), UsageError);
  d.micro_step();
  EXPECT_FALSE(d.control->step(kGroups).has_value());
  EXPECT_EQ(d.control->micro_steps(), 1);
}

}  // namespace
}  // namespace strata::engine::fake
