// A configuration key by key, and its rewritten form.
#include "strata/engine/config/config_review.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Finding finding_of(const ConfigReview& review, const std::string& path) {
  for (const Finding& finding : review.findings) {
    if (finding.path == path) return finding;
  }
  ADD_FAILURE() << "nothing is said of " << path;
  return {};
}

TEST(ConfigReview, SaysOfEachKeyWhatBecomesOfIt) {
  const ConfigReview review = review_config(R"({
      "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "mine": {"a": 1},
      "bfloat16": {"enabled": true}, "prescale_gradients": true, "steps_per_print": null,
      "tensor_parallel": {"autotp_size": 1}, "elasticity": {"enabled": true},
      "fp16": {"enabled": false, "loss_scale": 0},
      "optimizer": {"type": "Adam", "params": {"lr": 0.1, "foreach": true, "momentum": 1}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_com": true,
                            "offload_param": {"device": "cpu"}, "cpu_offload": true}})");
  using enum Verdict;
  const std::map<std::string, Verdict> wanted{
      {"train_micro_batch_size_per_gpu", kOpen},
      {"gradient_clipping", kOpen},
      {"mine", kOwn},
      {"bfloat16", kOldSpelling},
      {"bf16.enabled", kHonoured},
      {"prescale_gradients", kHint},
      {"steps_per_print", kHonoured},
      {"tensor_parallel", kOff},
      {"elasticity", kRefused},
      {"fp16.enabled", kHonoured},
      {"fp16.loss_scale", kHonoured},
      {"optimizer.type", kHonoured},
      {"optimizer.params.lr", kHonoured},
      {"optimizer.params.foreach", kHint},
      {"optimizer.params.momentum", kWrong},
      {"scheduler.type", kHonoured},
      {"scheduler.params.warmup_num_steps", kOpen},
      {"zero_optimization.stage", kHonoured},
      {"zero_optimization.reduce_bucket_size", kHonoured},
      {"zero_optimization.overlap_com", kWrong},
      {"zero_optimization.offload_param.device", kHonoured},
      {"zero_optimization.cpu_offload", kOldSpelling},
      {"zero_optimization.offload_optimizer.device", kHonoured},
      {"zero_optimization.offload_optimizer.pin_memory", kHint},
  };
  for (const auto& [path, verdict] : wanted)
    EXPECT_EQ(finding_of(review, path).verdict, verdict) << path;
  EXPECT_EQ(review.findings.size(), wanted.size());
  EXPECT_FALSE(review.accepted());
  EXPECT_FALSE(review.rewritten.has_value()) << "two keys are misspelled";
  EXPECT_EQ(finding_of(review, "elasticity").reason,
            "not supported (batch sizes that follow the world size); remove the section and set "
            "train_batch_size");
  EXPECT_EQ(finding_of(review, "elasticity").value, R"({"enabled":true})");
  EXPECT_EQ(finding_of(review, "bfloat16").reason, "write bf16");
  EXPECT_THAT(finding_of(review, "zero_optimization.overlap_com").reason,
              StartsWith("unknown key; the nearest known one is "));
  EXPECT_THAT(finding_of(review, "zero_optimization.reduce_bucket_size").reason,
              HasSubstr("its default, 500000000"));
}

TEST(ConfigReview, RewritesInTheOrderOfTheFile) {
  const ConfigReview review = review_config(R"({
      // as of 2021
      "zero_optimization": {"stage": 3, "max_live_parameters": 5, "zenflow": {"topk_ratio": 0.1},
                            "aio": {"thread_count": 2}, "cpu_offload_param": true, "b": "auto"},
      "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": false},
      "steps_per_print": Infinity, "a_key": 1, "betas": [0.9, 0.95],
      "bf16": {"enabled": "auto"}, "fp16": {"enabled": false}, })");
  EXPECT_EQ(finding_of(review, "zero_optimization.b").verdict, Verdict::kWrong);
  const ConfigReview good = review_config(R"({
      // as of 2021
      "zero_optimization": {"stage": 3, "max_live_parameters": 5, "zenflow": {"topk_ratio": 0.1},
                            "aio": {"thread_count": 2}, "cpu_offload_param": true},
      "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": false},
      "steps_per_print": Infinity, "a_key": [0.9, {"b": []}],
      "bf16": {"enabled": "auto"}, "fp16": {"enabled": false}, })");
  ASSERT_TRUE(good.rewritten.has_value());
  EXPECT_EQ(pretty_text(*good.rewritten), R"({
  "zero_optimization": {
    "stage": 3,
    "stage3_max_live_parameters": 5,
    "offload_param": {
      "device": "cpu",
      "pin_memory": true
    }
  },
  "steps_per_print": Infinity,
  "a_key": [
    0.9,
    {
      "b": []
    }
  ],
  "bf16": {
    "enabled": "auto"
  },
  "fp16": {
    "enabled": false
  },
  "aio": {
    "intra_op_parallelism": 2
  }
}
)");
  EXPECT_EQ(refusal_of(pretty_text(*good.rewritten)), "accepted");
  EXPECT_FALSE(good.accepted()) << "ZenFlow was on";
}

TEST(ConfigReview, FindsWhatOnlyTheSettingsTogetherTell) {
  const ConfigReview both =
      review_config(R"({"bf16": {"enabled": true}, "fp16": {"enabled": true}})");
  EXPECT_EQ(finding_of(both, "bf16.enabled").verdict, Verdict::kWrong);
  EXPECT_THAT(finding_of(both, "bf16.enabled").reason, StartsWith("contradicts fp16.enabled"));
  EXPECT_FALSE(both.accepted());
  const ConfigReview idle =
      review_config(R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})");
  EXPECT_EQ(finding_of(idle, "zero_optimization.offload_param.device").verdict, Verdict::kHint);
  EXPECT_TRUE(idle.accepted());
  const ConfigReview untyped = review_config(R"({"optimizer": {"params": {"lr": 1}}})");
  EXPECT_EQ(finding_of(untyped, "optimizer.type").verdict, Verdict::kOpen);
}

TEST(ConfigReview, LeavesToYouWhatItCannotChoose) {
  for (const char* config :
       {R"({"optimizer": {"type": "Lamb"}})", R"({"optimizer": {"type": "AdmW"}})",
        R"({"scheduler": {"type": "Cosine"}})", R"({"bf16": {}, "bfloat16": {}})",
        R"({"optimizer": {"type": "SGD", "params": {"lr": "x"}}})",
        R"({"zero_optimization": {"stage": 7}})"}) {
    const ConfigReview review = review_config(config);
    EXPECT_FALSE(review.rewritten.has_value()) << config;
    EXPECT_FALSE(review.accepted()) << config;
    EXPECT_EQ(review.count(Verdict::kRefused) + review.count(Verdict::kWrong), 1U) << config;
  }
  EXPECT_THROW(review_config("[1]"), ConfigError);
  EXPECT_THROW(review_config("{\"a\": "), ConfigError);
}

// The parser and the review say the same.
TEST(ConfigReview, AgreesWithTheParserOnRealConfigurations) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(STRATA_REAL_CONFIGS)) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    const std::string path = entry.path().string();
    const ConfigReview review = review_config(path);
    EXPECT_EQ(review.accepted(), refusal_of(path) == "accepted") << path;
    EXPECT_EQ(review.count(Verdict::kWrong), 0U) << path;
    if (!review.rewritten) continue;
    const std::string rewritten = pretty_text(*review.rewritten);
    EXPECT_EQ(refusal_of(rewritten), "accepted") << path;
    const ConfigReview again = review_config(rewritten);
    EXPECT_TRUE(again.accepted()) << path;
    EXPECT_EQ(again.count(Verdict::kOff) + again.count(Verdict::kOldSpelling), 0U) << path;
  }
  EXPECT_EQ(files, 28);
}

}  // namespace
}  // namespace strata::engine
