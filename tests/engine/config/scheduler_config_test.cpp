#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/parsing.h"
#include "strata/engine/config/optimizer_config.h"

namespace strata::engine {
namespace {

using testing::StartsWith;

std::string scheduler(const std::string& type, const std::string& params) {
  return R"({"scheduler": {"type": ")" + type + R"(", "params": )" + params + "}}";
}

TEST(SchedulerConfig, ReadsTypedParameters) {
  const Config c = parsed(scheduler("WarmupDecayLR", R"({"total_num_steps": 100.0,
      "warmup_max_lr": [1e-3, 1e-4], "warmup_num_steps": 5, "warmup_type": "linear",
      "last_batch_iteration": 3})"));
  EXPECT_EQ(c.scheduler->params.type, "WarmupDecayLR");
  EXPECT_EQ(c.scheduler->params.values,
            R"({"last_batch_iteration":3,"total_num_steps":100,"warmup_max_lr":[0.001,0.0001],)"
            R"("warmup_min_lr":0.0,"warmup_num_steps":5,"warmup_type":"linear"})");
  EXPECT_EQ(c.scheduler->last_iteration, 3);
}

TEST(SchedulerConfig, NamesTheNearestTypeAndParameter) {
  EXPECT_EQ(
      refusal_of(scheduler("WarmupLr2", "{}")),
      "scheduler.type: wanted WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest "
      "(the nearest is \"WarmupLR\"); pass a scheduler of torch.optim as lr_scheduler= to "
      "initialize; found \"WarmupLr2\"");
  EXPECT_THAT(refusal_of(scheduler("WarmupLR", R"({"warmup_steps": 5})")),
              StartsWith("scheduler.params.warmup_steps: unknown key; the nearest known one is "
                         "\"scheduler.params.warmup_"));
  EXPECT_THAT(refusal_of(scheduler("WarmupLR", R"({"total_num_steps": 5})")),
              StartsWith("scheduler.params.total_num_steps: unknown key"));
}

TEST(SchedulerConfig, NamesWhatIsRequired) {
  EXPECT_EQ(refusal_of(scheduler("WarmupDecayLR", "{}")),
            "scheduler.params.total_num_steps: WarmupDecayLR needs an integer >= 0 (steps of the "
            "whole training; required); found none");
  EXPECT_THAT(refusal_of(scheduler("OneCycle", R"({"cycle_min_lr": 0.1})")),
              StartsWith("scheduler.params.cycle_max_lr: OneCycle needs a number, or a list"));
}

TEST(SchedulerConfig, RefusesWrongValues) {
  EXPECT_THAT(refusal_of(scheduler("WarmupLR", R"({"warmup_num_steps": 0})")),
              StartsWith("scheduler.params.warmup_num_steps: wanted an integer > 0"));
  EXPECT_THAT(refusal_of(scheduler("WarmupLR", R"({"warmup_type": "cubic"})")),
              StartsWith("scheduler.params.warmup_type: wanted one of log, linear"));
  EXPECT_THAT(
      refusal_of(scheduler("WarmupLR", R"({"warmup_max_lr": ["a"]})")),
      StartsWith("scheduler.params.warmup_max_lr: wanted a number, or a list of one number a "
                 "parameter group, >= 0"));
}

TEST(SchedulerConfig, LeavesClassesOfTorchToPython) {
  const Config c = parsed(R"({"scheduler": {"type": "CosineAnnealingLR",
                              "params": {"T_max": "100", "eta_min": 1e-5, "last_epoch": null}}})");
  EXPECT_FALSE(c.scheduler.has_value());
  ASSERT_TRUE(c.torch_scheduler.has_value());
  EXPECT_EQ(c.torch_scheduler->type, "CosineAnnealingLR");
  EXPECT_EQ(c.torch_scheduler->params, R"({"T_max":100,"eta_min":1e-05})");
  const Config open =
      parsed(R"({"scheduler": {"type": "LinearLR", "params": {"total_iters": "auto"}}})");
  EXPECT_EQ(open.open.size(), 1U);
  EXPECT_THROW(open.require_filled_in("scheduler"), ConfigError);
}

}  // namespace
}  // namespace strata::engine
