#include "strata/engine/config/optimizer_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string optimizer(const std::string& type, const std::string& params = "{}") {
  return R"({"optimizer": {"type": ")" + type + R"(", "params": )" + params + "}}";
}

TEST(OptimizerConfig, ReadsAdamW) {
  const Config c = parsed(optimizer("AdamW", R"({"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6,
                                                 "weight_decay": 0.1, "foreach": null})"));
  EXPECT_EQ(c.optimizer->kind, OptimizerKind::kAdam);
  const kernels::UpdateScalars& adam = c.optimizer->adam;
  EXPECT_EQ(std::tuple(adam.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay),
            std::tuple(3e-4, 0.8, 0.95, 1e-6, 0.1));
  EXPECT_TRUE(adam.decoupled);
  EXPECT_TRUE(adam.bias_correction);
}

TEST(OptimizerConfig, TakesAdamForAdamWUnlessToldOtherwise) {
  EXPECT_TRUE(parsed(optimizer("Adam")).optimizer->adam.decoupled);
  EXPECT_FALSE(parsed(optimizer("Adam", R"({"adam_w_mode": false})")).optimizer->adam.decoupled);
  EXPECT_TRUE(parsed(optimizer("adamw", R"({"adam_w_mode": false})")).optimizer->adam.decoupled);
}

TEST(OptimizerConfig, HandsTorchAdamItsParametersAsTheyAre) {
  const Config c =
      parsed(optimizer("Adam", R"({"torch_adam": true, "adam_w_mode": false, "amsgrad": true,
                                   "lr": 0.01, "eps": "auto"})"));
  EXPECT_EQ(c.optimizer->kind, OptimizerKind::kTorch);
  EXPECT_EQ(c.optimizer->torch_class, "Adam");
  EXPECT_EQ(c.optimizer->torch_params, R"({"amsgrad":true,"lr":0.01})");
  EXPECT_FALSE(c.optimizer->in_own_kernel);
  EXPECT_EQ(parsed(optimizer("Adam", R"({"torch_adam": true})")).optimizer->torch_class, "AdamW");
}

TEST(OptimizerConfig, ComputesTorchAdamInItsOwnKernelWhereThatCan) {
  for (const auto& [params, decoupled] : std::vector<std::pair<const char*, bool>>{
           {R"({"torch_adam": true, "fused": true, "foreach": null})", true},
           {R"({"torch_adam": true, "adam_w_mode": false, "amsgrad": false})", false},
           {R"({"torch_adam": true, "bias_correction": true})", true},
           {R"({"bias_correction": false})", true}}) {
    const Config c = parsed(optimizer("Adam", params));
    EXPECT_TRUE(c.optimizer->in_own_kernel) << params;
    EXPECT_EQ(c.optimizer->adam.decoupled, decoupled) << params;
  }
  for (const char* params :
       {R"({"torch_adam": true, "maximize": true})", R"({"torch_adam": true, "capturable": 1})"})
    EXPECT_FALSE(parsed(optimizer("AdamW", params)).optimizer->in_own_kernel) << params;
  EXPECT_FALSE(parsed(optimizer("SGD", R"({"lr": 1})")).optimizer->in_own_kernel);
}

TEST(OptimizerConfig, ReadsWhetherMomentsAreCorrected) {
  EXPECT_TRUE(parsed(optimizer("Adam")).optimizer->adam.bias_correction);
  EXPECT_FALSE(
      parsed(optimizer("Adam", R"({"bias_correction": false})")).optimizer->adam.bias_correction);
  EXPECT_THAT(refusal_of(optimizer("Adam", R"({"bias_correction": false, "torch_adam": true})")),
              StartsWith("optimizer.params.bias_correction: torch.optim's Adam always corrects"));
}

TEST(OptimizerConfig, HandsElementwiseClassesOfTorchTheirs) {
  const Config c = parsed(optimizer("adagrad", R"({"lr": 0.1, "anything": [1, 2]})"));
  EXPECT_EQ(c.optimizer->kind, OptimizerKind::kTorch);
  EXPECT_EQ(c.optimizer->torch_class, "Adagrad");
  EXPECT_EQ(c.optimizer->torch_params, R"({"anything":[1,2],"lr":0.1})");
}

TEST(OptimizerConfig, KnowsLionWhichTorchLacks) {
  const Config c = parsed(optimizer("Lion", R"({"lr": 1e-4, "betas": [0.95, 0.98]})"));
  EXPECT_EQ(c.optimizer->kind, OptimizerKind::kTorch);
  EXPECT_EQ(c.optimizer->torch_class, "Lion");
  EXPECT_EQ(c.optimizer->torch_params, R"({"betas":[0.95,0.98],"lr":0.0001})");
  EXPECT_THAT(refusal_of(optimizer("Lion", R"({"lr": "fast"})")), HasSubstr("strata.ops.lion"));
}

TEST(OptimizerConfig, KeepsStatesIn8BitsByTheTypeOrByAKey) {
  for (const char* type : {"AdamW8bit", "Adam8bit", "Lion8bit", "adamw8bit"}) {
    const Config c = parsed(optimizer(type));
    EXPECT_TRUE(c.optimizer->in_8_bits);
    EXPECT_TRUE(c.strata.states_8bit);
    EXPECT_EQ(c.strata.min_8bit_size, 4096);
    EXPECT_TRUE(c.strata.keep_small_moments);
  }
  const Config by_key = parsed(
      R"({"optimizer": {"type": "AdamW"}, "strata": {"optimizer_states": "8bit", "min_8bit_size": 1,
          "keep_small_moments": false}})");
  EXPECT_TRUE(by_key.strata.states_8bit);
  EXPECT_EQ(by_key.strata.min_8bit_size, 1);
  EXPECT_FALSE(by_key.strata.keep_small_moments);
  EXPECT_FALSE(parsed(optimizer("AdamW")).strata.states_8bit);
  EXPECT_THAT(refusal_of(optimizer("SGD8bit")), HasSubstr("AdamW8bit, Adam8bit and Lion8bit"));
}

TEST(OptimizerConfig, RefusesWhatCannotRunOnShards) {
  EXPECT_EQ(refusal_of(optimizer("Lamb")),
            "optimizer.type: not supported (torch has no such class; an object of one, such as "
            "timm.optim.Lamb(model.parameters(), ...), may be passed as optimizer= to initialize, "
            "and gets whole parameters); write \"AdamW\" or another elementwise class of "
            "torch.optim; found \"Lamb\"");
  EXPECT_THAT(refusal_of(optimizer("LBFGS")), HasSubstr("not supported"));
  EXPECT_THAT(refusal_of(optimizer("Adafactor")), HasSubstr("pass torch.optim.Adafactor"));
}

TEST(OptimizerConfig, ReadsMuonByTheKeysOfDeepSpeed) {
  const Config c = parsed(optimizer("muon", R"({"lr": 0.02, "adam_lr": "3e-4", "momentum": 0.9,
      "betas": [0.9, 0.95], "ns_method": "gram", "torch_adam": false, "per_head_muon": true})"));
  EXPECT_EQ(c.optimizer->torch_class, "Muon");
  EXPECT_EQ(
      c.optimizer->torch_params,
      R"({"adam_lr":0.0003,"betas":[0.9,0.95],"lr":0.02,"momentum":0.9,"per_head_muon":true})");
  EXPECT_THAT(refusal_of(optimizer("Muon", R"({"moment": 0.9})")),
              HasSubstr("optimizer.params.moment: wanted a key of Muon"));
  EXPECT_THAT(refusal_of(optimizer("Muon", R"({"ns_method": "svd"})")),
              HasSubstr("optimizer.params.ns_method: wanted \"gram\" or \"standard\""));
  EXPECT_THAT(refusal_of(optimizer("Muon", R"({"adam_w_mode": false})")),
              HasSubstr("optimizer.params.adam_w_mode: wanted true"));
  EXPECT_THAT(refusal_of(optimizer("Muon", R"({"fp32_optimizer_states": false})")),
              HasSubstr("optimizer.params.fp32_optimizer_states: wanted true"));
}

TEST(OptimizerConfig, NamesTheNearestTypeAndParameter) {
  EXPECT_EQ(
      refusal_of(optimizer("AdmW")),
      "optimizer.type: wanted Adam, AdamW or an elementwise class of torch.optim (the nearest "
      "is \"AdamW\"); pass others as optimizer= to initialize; found \"AdmW\"");
  EXPECT_THAT(refusal_of(optimizer("AdamW", R"({"weigth_decay": 0.1})")),
              StartsWith("optimizer.params.weigth_decay: unknown key; the nearest known one is "
                         "\"optimizer.params.weight_decay\""));
}

TEST(OptimizerConfig, RefusesParametersThatItsKernelLacks) {
  EXPECT_EQ(refusal_of(optimizer("AdamW", R"({"max_grad_norm": 1.0})")),
            "optimizer.params.max_grad_norm: clipping is no parameter of the optimizer; write "
            "\"gradient_clipping\": 1.0 at the top level; found 1.0");
  EXPECT_THAT(refusal_of(optimizer("AdamW", R"({"amsgrad": true})")),
              StartsWith("optimizer.params.amsgrad: not supported (the AMSGrad variant); add "
                         "\"torch_adam\": true"));
  EXPECT_THAT(refusal_of(optimizer("AdamW", R"({"betas": [0.9]})")),
              StartsWith("optimizer.params.betas: wanted a list of numbers, 2 of 0..1"));
  EXPECT_THAT(refusal_of(optimizer("AdamW", R"({"lr": -1})")),
              StartsWith("optimizer.params.lr: wanted a number >= 0 (learning rate); found -1"));
  EXPECT_THAT(refusal_of(optimizer("AdamW", R"({"torch_adam": "yes"})")),
              StartsWith("optimizer.params.torch_adam: wanted true or false"));
}

TEST(OptimizerConfig, TakesParametersWithoutATypeForTheCallersOwn) {
  EXPECT_FALSE(parsed(R"({"optimizer": {"params": {"lr": 1}}})").optimizer.has_value());
}

TEST(OptimizerConfig, HandsTorchNumbersAndNamesWhatNobodyFilledIn) {
  const Config c = parsed(optimizer(
      "SGD", R"({"lr": "0.1", "momentum": "auto", "weight_decay": "auto", "fused": false})"));
  EXPECT_EQ(c.optimizer->torch_params, R"({"fused":false,"lr":0.1})");
  ASSERT_EQ(c.open.size(), 2U);
  EXPECT_EQ(c.open[0].problem,
            "optimizer.params.momentum: \"auto\" is filled in by frameworks such as transformers' "
            "Trainer, and here none has; write what torch.optim.SGD shall get, for example "
            "\"momentum\": 0; found \"auto\"");
  EXPECT_EQ(c.open[1].path, "optimizer.params.weight_decay");
  EXPECT_EQ(refusal_of(optimizer("SGD", R"({"lr": "0.1x"})")),
            "optimizer.params.lr: wanted a number, true or false for torch.optim.SGD; found "
            "\"0.1x\"");
}

}  // namespace
}  // namespace strata::engine
