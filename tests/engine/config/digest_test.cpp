// Tests the text by which ranks compare their configurations, and the settings that it leaves out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(Digest, IsTheSameForOneMeaningInTwoSpellings) {
  EXPECT_EQ(
      parsed(R"({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})").digest(),
      parsed(R"({"zero_optimization": {"contiguous_gradients": true, "stage": 2.0}})").digest());
}

TEST(Digest, HasALineForEachPath) {
  const auto digest =
      parsed(R"({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}})").digest();
  EXPECT_THAT(digest, HasSubstr("\nzero_optimization.stage = 2\n"));
  EXPECT_THAT(digest, HasSubstr("gradient_clipping = 0.5\n"));
}

TEST(Digest, HoldsOptimizerAndSchedulerParameters) {
  const auto with = [](const std::string& params) {
    return parsed(R"({"optimizer": {"type": "AdamW", "params": )" + params + "}}").digest();
  };
  EXPECT_EQ(with("{}"), with(R"({"lr": 0.001, "betas": [0.9, 0.999]})"));
  EXPECT_THAT(with("{}"), HasSubstr("\noptimizer.params.lr = 0.001\n"));
  EXPECT_THAT(with(R"({"lr": 0.01})"), HasSubstr("\noptimizer.params.lr = 0.01\n"));
  EXPECT_THAT(parsed("{}").digest(), Not(HasSubstr("optimizer.params.lr")));
}

TEST(Digest, HoldsTheCompletedBatch) {
  Config a = parsed(R"({"train_batch_size": 8})");
  Config b = parsed(R"({"train_micro_batch_size_per_gpu": 4})");
  EXPECT_NE(a.digest(), b.digest());
  a.complete_batch(2);
  b.complete_batch(2);
  EXPECT_EQ(a.digest(), b.digest());
}

TEST(ShownSettings, MarksHintsWhoseMemoryOrOutputIsMissed) {
  const Config c = parsed(R"({"activation_checkpointing": {"partition_activations": true,
      "contiguous_memory_optimization": false}, "prescale_gradients": true})");
  ASSERT_EQ(c.hints.size(), 3U);
  for (const Hint& hint : c.hints)
    EXPECT_EQ(hint.missed, hint.path == "activation_checkpointing.partition_activations")
        << hint.path;
}

TEST(ShownSettings, KeepsWhatARankShowsOutOfTheDigest) {
  const Config c = parsed(R"({"wandb": {"enabled": true, "project": "x"},
                              "wall_clock_breakdown": 1, "comet": {"online": null}})");
  EXPECT_EQ(c.digest(), parsed("{}").digest());
  EXPECT_EQ(c.shown.at("wandb.enabled"), "true");
  EXPECT_EQ(c.shown.at("wandb.project"), "\"x\"");
  EXPECT_EQ(c.shown.at("wandb.team"), "null");
  EXPECT_EQ(c.shown.at("wall_clock_breakdown"), "true");
  EXPECT_EQ(c.shown.at("flops_profiler.profile_step"), "1");
  EXPECT_EQ(c.shown_given,
            (std::set<std::string>{"wall_clock_breakdown", "wandb.enabled", "wandb.project"}));
  EXPECT_TRUE(c.hints.empty());
  EXPECT_THAT(refusal_of(R"({"csv_monitor": {"enabled": "yes"}})"),
              StartsWith("csv_monitor.enabled: wanted true or false"));
}

}  // namespace
}  // namespace strata::engine
