#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "engine/config/parsing.h"
#include "strata/engine/config/config.h"

namespace strata::engine {
namespace {

using testing::StartsWith;

TEST(ShownSettings, MarksHintsWhoseMemoryOrOutputIsMissed) {
  const Config c = parsed(R"({"activation_checkpointing": {"cpu_checkpointing": true,
      "partition_activations": false}, "prescale_gradients": true})");
  ASSERT_EQ(c.hints.size(), 3U);
  for (const Hint& hint : c.hints)
    EXPECT_EQ(hint.missed, hint.path == "activation_checkpointing.cpu_checkpointing") << hint.path;
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
