// Settings that are still "auto": some have a default, for others the user has to choose.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(OpenSettings, DropsAutoInSectionsAndWhereCallersFillIn) {
  const Config c = parsed(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})");
  EXPECT_TRUE(c.open.empty());
  EXPECT_FALSE(c.batch.train_batch_size.has_value());
  EXPECT_EQ(c.batch.micro_batch_size, 2);
  EXPECT_EQ(c.precision.param_dtype, std::nullopt) << "each parameter's own";
  EXPECT_EQ(c.zero.reduce_bucket_size, Numel(500'000'000));
}

std::string problem_of(const Config& config, const std::string& section) {
  try {
    config.require_filled_in(section);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "none";
}

TEST(OpenSettings, WantsNumbersThatNobodyFilledInWhereTheyAreNeeded) {
  const Config c = parsed(R"({"gradient_clipping": "auto",
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                    "weight_decay": "auto", "torch_adam": "auto"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto",
                    "warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}}})");
  EXPECT_EQ(problem_of(c, "gradient_clipping"),
            "gradient_clipping: \"auto\" is filled in by frameworks such as transformers' Trainer, "
            "and here none has; write a number >= 0 (largest global L2 norm of the gradient; 0 "
            "does not clip), for example \"gradient_clipping\": 1.0; found \"auto\"");
  EXPECT_THAT(problem_of(c, "optimizer"), StartsWith("optimizer.params.betas: \"auto\" is filled"));
  EXPECT_THAT(problem_of(c, "scheduler"),
              StartsWith("scheduler.params.total_num_steps: \"auto\" is filled in"));
  EXPECT_THAT(problem_of(c, "scheduler"), HasSubstr("for example \"total_num_steps\": 1000;"));
  EXPECT_EQ(problem_of(c, "optim"), "none");
  EXPECT_NE(problem_of(c, ""), "none");
  EXPECT_EQ(c.open.size(), 9U);
  EXPECT_EQ(c.optimizer->adam.lr, 1e-3);  // the default of an open setting may be read
  EXPECT_FALSE(c.scheduler.has_value());
}

TEST(OpenSettings, WantsAStageAndASchedulerThatSomebodyChose) {
  const Config c =
      parsed(R"({"zero_optimization": {"stage": "auto"}, "scheduler": {"type": "auto"}})");
  EXPECT_THAT(problem_of(c, "zero_optimization"), StartsWith("zero_optimization.stage: \"auto\""));
  EXPECT_THAT(problem_of(c, "scheduler"), StartsWith("scheduler.type: \"auto\" is filled in"));
  EXPECT_EQ(c.open.size(), 2U);
}

TEST(OpenSettings, WantsAPrecisionAndAnAccumulationThatSomebodyChose) {
  for (const char* section : {"bf16", "fp16", "torch_autocast"}) {
    const Config c = parsed(fmt::format(R"({{"{}": {{"enabled": "auto"}}}})", section));
    EXPECT_THAT(problem_of(c, section),
                StartsWith(fmt::format("{}.enabled: \"auto\" is", section)));
    EXPECT_THAT(problem_of(c, section), HasSubstr("for example \"enabled\": true"));
    EXPECT_THROW(c.require_for_training(true, true), ConfigError);
  }
  EXPECT_EQ(parsed(R"({"fp16": {"enabled": true, "loss_scale": "auto", "hysteresis": "auto"}})")
                .open.size(),
            2U);
  for (const char* off : {R"({"fp16": {"enabled": false, "loss_scale": "auto"}})",
                          R"({"fp16": {"loss_scale": "auto"}})"})
    EXPECT_TRUE(parsed(off).open.empty()) << off;
  EXPECT_THAT(problem_of(parsed(R"({"communication_data_type": "auto"})"), ""),
              HasSubstr("for example \"communication_data_type\": \"fp32\""));
  EXPECT_THAT(problem_of(parsed(R"({"train_micro_batch_size_per_gpu": 2,
                                    "gradient_accumulation_steps": "auto"})"),
                         ""),
              StartsWith("gradient_accumulation_steps: \"auto\" is filled in"));
  EXPECT_TRUE(parsed(R"({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 8,
                         "gradient_accumulation_steps": "auto"})")
                  .open.empty());
  const Config optimizer = parsed(R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})");
  EXPECT_THROW(optimizer.require_for_training(false, true), ConfigError);
  EXPECT_NO_THROW(optimizer.require_for_training(true, false));
}

TEST(OpenSettings, WantsTheClassOfAnOptimizerThatTrains) {
  for (const char* sign :
       {R"({"optimizer": {"params": {"lr": 1}}})", R"({"optimizer": {}, "gradient_clipping": 1})",
        R"({"optimizer": {"type": null}, "gradient_accumulation_steps": 2})",
        R"({"optimizer": {"type": "auto"}, "scheduler": {"type": "WarmupLR"}})"}) {
    EXPECT_THAT(problem_of(parsed(sign), "optimizer"),
                StartsWith("optimizer.type: wanted the optimizer's class, since "))
        << sign;
  }
  EXPECT_EQ(problem_of(parsed(R"({"optimizer": {}, "train_batch_size": 1})"), "optimizer"), "none");
  EXPECT_EQ(problem_of(parsed(R"({"optimizer": null, "gradient_clipping": 1})"), ""), "none");
}

}  // namespace
}  // namespace strata::engine
