#include "strata/plan/unit_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "plan/model_builder.h"
#include "strata/base/error.h"

namespace strata::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names(const ModelPlan& plan) {
  std::vector<std::string> result;
  for (const UnitSpec& unit : plan.units) result.push_back(unit.name);
  return result;
}

ModelPlan plan_of(const ModelBuilder& b, const PlanOptions& options = {}) {
  return plan_units(b.params, b.tree, options);
}

TEST(UnitPlan, ABlockIsOneUnitAndItsScopeCoversTheSubtree) {
  ModelBuilder b;
  const int embed = b.linear(0, "embed", 8);
  const int layers = b.list(0, "layers");
  const int first = b.block(layers, "0", "Layer");
  const int second = b.block(layers, "1", "Layer");
  const int head = b.linear(0, "head", 8);
  const ModelPlan plan = plan_of(b);
  EXPECT_THAT(names(plan), ElementsAre("embed", "layers.0", "layers.1", "head"));
  ASSERT_EQ(plan.scopes.size(), 4U);
  const int modules[] = {embed, first, second, head};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(plan.scopes[i].module, modules[i]);
    EXPECT_THAT(plan.scopes[i].units, ElementsAre(static_cast<int>(i)));
  }
  EXPECT_THAT(plan.unit_of_param, ElementsAre(0, 1, 2, 3));
}

TEST(UnitPlan, HiddenMatricesTakeMuonsRule) {
  std::vector<ParamSpec> params{{"model.embed_tokens.weight", {96, 64}},
                                {"model.layers.0.up.weight", {192, 64}},
                                {"model.layers.0.experts.down", {8, 64, 192}},
                                {"model.layers.0.conv.weight", {64, 3, 5, 5}},
                                {"model.layers.0.filters.weight", {64, 1, 5, 5}},
                                {"model.layers.0.norm.weight", {64}},
                                {"model.layers.0.gate.weight", {1, 64}},
                                {"lm_head.weight", {96, 64}},
                                {"wpe.weight", {64, 64}}};
  params.push_back({"frozen.weight", {64, 64}, DType::kFloat32, false});
  const ModuleTree tree{{"", "", -1, {0, 1, 2, 3, 4, 5, 6, 7, 9}}, {"wpe", "wpe", 0, {8}}};
  take_muon(params, tree);
  std::vector<std::string> found;
  for (const ParamSpec& param : params)
    if (param.rule == UpdateRule::kMuon) found.push_back(param.name);
  EXPECT_THAT(found, ElementsAre("model.layers.0.up.weight", "model.layers.0.experts.down",
                                 "model.layers.0.conv.weight"));
}

TEST(UnitPlan, LargeWeightsOutsideEmbeddingsTakeStatesIn8Bits) {
  ModelBuilder b;
  const int embedding = b.module(0, "embed", "ScaledEmbedding");
  const int tied = b.param(embedding, "weight", 9000);
  const int head = b.linear(0, "head", 5000);
  b.tie(head, tied);
  const int small = b.param(head, "bias", 4095);
  const int frozen = b.param(head, "frozen", 5000, DType::kFloat32, false);
  const int tile = b.param(head, "tile", 512);
  b.params[static_cast<std::size_t>(tile)].tile = TileOf{"whole", {9, 512}, Numel(1024)};
  take_8_bits(b.params, b.tree, 4096);
  const auto has = [&](int param) {
    return b.params[static_cast<std::size_t>(param)].states == StateForm::k8Bit;
  };
  EXPECT_FALSE(has(tied) || has(small) || has(frozen));
  EXPECT_TRUE(has(b.tree[static_cast<std::size_t>(head)].params.front()));
  EXPECT_TRUE(has(tile));
  EXPECT_THAT(describe(b.params, plan_of(b)), HasSubstr("states in 8 bits"));
  b.params[static_cast<std::size_t>(tile)].tile->first = Numel(1025);
  EXPECT_THROW(plan_of(b), ConfigError);
}

TEST(UnitPlan, ParametersOfOneRuleShareAUnit) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1"}) {
    const int layer = b.block(layers, name, "Layer", 1000);
    b.param(layer, "up", 1000);
    const int norm = b.param(layer, "norm", 4);
    b.params[static_cast<std::size_t>(norm)].rule = UpdateRule::kAdam;
  }
  const ModelPlan plan = plan_of(b);
  EXPECT_THAT(names(plan), ElementsAre("layers.0", "layers.0:float32:adam", "layers.1",
                                       "layers.1:float32:adam"));
  EXPECT_EQ(plan.units[0].params.size(), 2U);
  EXPECT_THAT(plan.units[1].params, ElementsAre(2));
  EXPECT_EQ(plan.units[1].rule, UpdateRule::kAdam);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre(0, 1));
  EXPECT_THAT(describe(b.params, plan), HasSubstr("updated by adam"));
}

TEST(UnitPlan, ABlockIsSplitByDTypeTrainabilityAndPersistence) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1"}) {
    const int layer = b.block(layers, name, "Layer", 1000);
    b.param(layer, "half", 1000, DType::kBFloat16);
    b.param(layer, "frozen", 1000, DType::kFloat32, false);
    b.param(layer, "bias", 4);
  }
  PlanOptions options;
  options.persistence_threshold = Numel(10);
  const ModelPlan plan = plan_of(b, options);
  EXPECT_THAT(names(plan),
              ElementsAre("layers.0", "layers.0:float32:frozen", "layers.0:float32:persistent",
                          "layers.0:float32", "layers.1", "layers.1:float32:frozen",
                          "layers.1:float32:persistent", "layers.1:float32"));
  EXPECT_EQ(plan.units[0].dtype, DType::kBFloat16);
  EXPECT_FALSE(plan.units[1].trainable);
  EXPECT_TRUE(plan.units[2].persistent);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre(0, 1, 2, 3));
}

TEST(UnitPlan, PersistenceEndsAtItsTotal) {
  ModelBuilder b;
  for (const char* name : {"a", "b", "c"}) b.linear(0, name, 10);
  PlanOptions options;
  options.persistence_threshold = Numel(10);
  options.persistence_total = Numel(20);
  const ModelPlan plan = plan_of(b, options);
  EXPECT_THAT(names(plan), ElementsAre("a", "c"));
  EXPECT_TRUE(plan.units[0].persistent);
  EXPECT_FALSE(plan.units[1].persistent);
  EXPECT_THAT(plan.unit_of_param, ElementsAre(0, 0, 1));
}

TEST(UnitPlan, ParametersOutsideBlocksShareUnitsUpToTheBound) {
  ModelBuilder b;
  for (const char* name : {"a", "b", "c", "large", "d"}) {
    b.linear(0, name, std::string(name) == "large" ? 1000 : 100);
  }
  PlanOptions options;
  options.unit_bytes = 800_B;  // two of 100 elements
  const ModelPlan plan = plan_of(b, options);
  EXPECT_THAT(names(plan), ElementsAre("a", "c", "large", "d"));
  EXPECT_THAT(plan.unit_of_param, ElementsAre(0, 0, 1, 2, 3));
  EXPECT_THAT(plan.scopes[1].units, ElementsAre(0)) << "every owner is a scope of its own";
}

TEST(UnitPlan, ModulesOutsideBlocksShareNoMoreThanMayBeLive) {
  ModelBuilder b;
  for (const char* name : {"a", "b", "c"}) b.param(b.linear(0, name, 100), "bias", 10);
  PlanOptions options;
  options.shared_numel = Numel();
  EXPECT_THAT(plan_of(b, options).unit_of_param, ElementsAre(0, 0, 1, 1, 2, 2));
  options.shared_numel = Numel(220);
  EXPECT_THAT(plan_of(b, options).unit_of_param, ElementsAre(0, 0, 0, 0, 1, 1));
  options.one_by_one = true;
  options.shared_numel = Numel();
  EXPECT_THAT(plan_of(b, options).unit_of_param, ElementsAre(0, 0, 1, 1, 2, 2));
}

TEST(UnitPlan, WhatMayBeLiveBoundsNeitherABlockNorWhatStaysGathered) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1"}) b.linear(b.block(layers, name, "Layer", 100), "out", 100);
  for (const char* name : {"a", "b"}) b.linear(0, name, 5);
  PlanOptions options;
  options.shared_numel = Numel();
  options.persistence_threshold = Numel(5);
  EXPECT_THAT(plan_of(b, options).unit_of_param, ElementsAre(0, 0, 1, 1, 2, 2));
}

TEST(UnitPlan, NeighboursAcrossABlockDoNotShareAUnit) {
  ModelBuilder b;
  b.linear(0, "embed", 8);
  const int layers = b.list(0, "layers");
  b.block(layers, "0", "Layer");
  b.block(layers, "1", "Layer");
  b.linear(0, "norm", 8);
  b.linear(0, "head", 8);
  EXPECT_THAT(names(plan_of(b)), ElementsAre("embed", "layers.0", "layers.1", "norm"));
}

TEST(UnitPlan, ATiedParameterHasOneUnitAndEveryOwnersScopeListsIt) {
  ModelBuilder b;
  const int embed = b.linear(0, "embed", 8);
  const int layers = b.list(0, "layers");
  const int layer = b.block(layers, "0", "Layer");
  b.block(layers, "1", "Layer");
  const int tied = b.tree[static_cast<std::size_t>(embed)].params[0];
  const int head = b.module(0, "head", "Linear");
  b.tie(head, tied);
  b.tie(layer, tied);
  const ModelPlan plan = plan_of(b);
  EXPECT_EQ(plan.unit_of_param[static_cast<std::size_t>(tied)], 0);
  ASSERT_EQ(plan.scopes.size(), 4U);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre(0));
  EXPECT_THAT(plan.scopes[1].units, ElementsAre(0, 1));
  EXPECT_EQ(plan.scopes[3].module, head);
  EXPECT_THAT(plan.scopes[3].units, ElementsAre(0));
  for (const UnitSpec& unit : plan.units) EXPECT_FALSE(unit.params.empty()) << unit.name;
}

TEST(UnitPlan, NoTwoUnitsHaveTheSameName) {
  ModelBuilder b;
  for (int i = 0; i < 4; ++i) b.param(0, "p" + std::to_string(i), 100);
  PlanOptions options;
  options.unit_bytes = 1_B;  // every parameter a unit, all of one owner
  const ModelPlan plan = plan_of(b, options);
  EXPECT_THAT(names(plan),
              ElementsAre("(root)", "(root):float32", "(root):float32#2", "(root):float32#3"));
}

TEST(UnitPlan, AModelThatIsOneBlockHasAName) {
  ModelBuilder b;
  b.linear(0, "only", 8);
  PlanOptions options;
  options.wrap = {"Model"};
  EXPECT_THAT(names(plan_of(b, options)), ElementsAre("(root)"));
}

// A layer's norm and bias of 8 elements, and weights of 100 and more.
void add_layer(ModelBuilder& b, int layers, const std::string& name) {
  const int layer = b.module(layers, name, "Layer");
  b.linear(layer, "norm", 8);
  const int up = b.linear(layer, "up", 100);
  b.param(up, "bias", 8);
  b.linear(layer, "down", 200);
}

PlanOptions one_by_one() {
  PlanOptions options;
  options.one_by_one = true;
  options.small_bytes = 64_B;  // of 8 elements, two
  return options;
}

// By scope, the path of its module and the names of its units.
std::vector<std::pair<std::string, std::vector<std::string>>> scopes_of(const ModelBuilder& b,
                                                                        const ModelPlan& plan) {
  std::vector<std::pair<std::string, std::vector<std::string>>> result;
  for (const ScopeSpec& scope : plan.scopes) {
    result.push_back({b.tree[static_cast<std::size_t>(scope.module)].path, {}});
    for (const int unit : scope.units)
      result.back().second.push_back(plan.units[static_cast<std::size_t>(unit)].name);
  }
  return result;
}

TEST(UnitPlanOneByOne, AParameterIsAUnitAndItsOwnerTheScope) {
  ModelBuilder b;
  b.linear(0, "embed", 300);
  const int layers = b.list(0, "layers");
  add_layer(b, layers, "0");
  add_layer(b, layers, "1");
  const ModelPlan plan = plan_of(b, one_by_one());
  EXPECT_THAT(names(plan),
              ElementsAre("embed.weight", "layers.0", "layers.0.up.weight", "layers.0.down.weight",
                          "layers.1", "layers.1.up.weight", "layers.1.down.weight"));
  using Units = std::vector<std::string>;
  EXPECT_THAT(scopes_of(b, plan),
              ElementsAre(std::pair("embed", Units{"embed.weight"}),
                          std::pair("layers.0.norm", Units{"layers.0"}),
                          std::pair("layers.0.up", Units{"layers.0", "layers.0.up.weight"}),
                          std::pair("layers.0.down", Units{"layers.0.down.weight"}),
                          std::pair("layers.1.norm", Units{"layers.1"}),
                          std::pair("layers.1.up", Units{"layers.1", "layers.1.up.weight"}),
                          std::pair("layers.1.down", Units{"layers.1.down.weight"})))
      << "small ones share a unit within their block";
}

TEST(UnitPlanOneByOne, SmallOnesShareUpToTheirBound) {
  ModelBuilder b;
  for (const char* name : {"a", "b", "c"}) b.linear(0, name, 8);
  EXPECT_THAT(plan_of(b, one_by_one()).unit_of_param, ElementsAre(0, 0, 1));
  PlanOptions alone = one_by_one();
  alone.small_bytes = 1_B;
  EXPECT_THAT(names(plan_of(b, alone)), ElementsAre("a.weight", "b.weight", "c.weight"));
}

TEST(UnitPlanOneByOne, DTypesAndFrozenParametersDoNotShare) {
  ModelBuilder b;
  b.param(0, "a", 8);
  b.param(0, "b", 8, DType::kBFloat16);
  b.param(0, "c", 8, DType::kFloat32, false);
  EXPECT_THAT(plan_of(b, one_by_one()).unit_of_param, ElementsAre(0, 1, 2));
}

TEST(UnitPlanOneByOne, WhatStaysGatheredSharesUnitsOfABlock) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  add_layer(b, layers, "0");
  add_layer(b, layers, "1");
  PlanOptions options = one_by_one();
  options.persistence_threshold = Numel(100);
  const ModelPlan plan = plan_of(b, options);
  EXPECT_THAT(names(plan),
              ElementsAre("layers.0", "layers.0.down.weight", "layers.1", "layers.1.down.weight"));
  EXPECT_TRUE(plan.units[0].persistent);
  EXPECT_EQ(plan.units[0].params.size(), 3U);
}

TEST(UnitPlanOneByOne, ParametersOfWhatIsNeverCalledBelongToWhoContainsIt) {
  ModelBuilder b;
  const int mixer = b.module(0, "mixer", "Mixer");
  const int weights = b.list(mixer, "weights");
  b.param(weights, "0", 100);
  b.param(weights, "1", 100);
  const ModelPlan plan = plan_of(b, one_by_one());
  ASSERT_EQ(plan.scopes.size(), 1U);
  EXPECT_EQ(plan.scopes[0].module, mixer);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre(0, 1));
}

TEST(UnitPlanOneByOne, WhatWasNamedIsOneScopeOfManyUnits) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1"}) {
    const int layer = b.module(layers, name, "Layer");
    b.linear(layer, "attention", 100);
    const int experts = b.list(b.module(layer, "mlp", "Experts"), "experts");
    for (const char* expert : {"0", "1"}) b.linear(experts, expert, 100);
  }
  PlanOptions leaf = one_by_one();
  leaf.leaves.classes = {"package.Experts"};
  const ModelPlan plan = plan_of(b, leaf);
  ASSERT_EQ(plan.units.size(), 6U);
  ASSERT_EQ(plan.scopes.size(), 4U);
  EXPECT_EQ(b.tree[static_cast<std::size_t>(plan.scopes[1].module)].path, "layers.0.mlp");
  EXPECT_THAT(plan.scopes[1].units, ElementsAre(1, 2));
  PlanOptions wrap = one_by_one();
  wrap.wrap = {"Layer"};
  const ModelPlan wrapped = plan_of(b, wrap);
  ASSERT_EQ(wrapped.scopes.size(), 2U);
  EXPECT_THAT(wrapped.scopes[0].units, ElementsAre(0, 1, 2));
}

TEST(UnitPlanOneByOne, ATiedParameterIsInTheScopesOfAllOwners) {
  ModelBuilder b;
  const int embed = b.linear(0, "embed", 300);
  const int head = b.module(0, "head", "Linear");
  b.tie(head, b.tree[static_cast<std::size_t>(embed)].params[0]);
  const ModelPlan plan = plan_of(b, one_by_one());
  ASSERT_EQ(plan.units.size(), 1U);
  ASSERT_EQ(plan.scopes.size(), 2U);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre(0));
  EXPECT_THAT(plan.scopes[1].units, ElementsAre(0));
}

TEST(UnitPlan, AModelWithoutParametersHasNoUnits) {
  const ModelPlan plan = plan_of(ModelBuilder());
  EXPECT_TRUE(plan.units.empty());
  EXPECT_TRUE(plan.scopes.empty());
}

TEST(UnitPlan, TheDescriptionDiffersWhereverModelsOrPlansDo) {
  const auto build = [](std::int64_t numel, DType dtype, bool trainable, int group,
                        const PlanOptions& options) {
    ModelBuilder b;
    b.param(0, "w", numel, dtype, trainable);
    b.params[0].group = group;
    return describe(b.params, plan_of(b, options));
  };
  PlanOptions persistent;
  persistent.persistence_threshold = Numel(100);
  const std::set<std::string> texts = {
      build(8, DType::kFloat32, true, 0, {}),  build(9, DType::kFloat32, true, 0, {}),
      build(8, DType::kBFloat16, true, 0, {}), build(8, DType::kFloat32, false, 0, {}),
      build(8, DType::kFloat32, true, 1, {}),  build(8, DType::kFloat32, true, 0, persistent),
  };
  EXPECT_EQ(texts.size(), 6U);
  EXPECT_THAT(*texts.begin(), HasSubstr("parameter w: shape [8]"));
}

TEST(UnitPlan, PlansEveryParameterOfALargeModelOnce) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (int layer = 0; layer < 500; ++layer) {
    const int block = b.module(layers, std::to_string(layer), "Layer");
    for (int i = 0; i < 38; ++i) b.linear(block, "m" + std::to_string(i), 10);
  }
  const ModelPlan plan = plan_of(b);
  EXPECT_EQ(plan.units.size(), 500U);
  std::vector<int> met(b.params.size());
  for (const UnitSpec& unit : plan.units) {
    for (const int param : unit.params) ++met[static_cast<std::size_t>(param)];
  }
  EXPECT_THAT(met, ::testing::Each(1));
}

}  // namespace
}  // namespace strata::plan
