#include "strata/plan/unit_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "plan/model_builder.h"

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
