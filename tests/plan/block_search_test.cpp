#include "strata/plan/block_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/model_builder.h"
#include "strata/base/error.h"

namespace strata::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> paths(const ModuleTree& tree, const std::vector<int>& blocks) {
  std::vector<std::string> result;
  for (const int block : blocks) result.push_back(tree[static_cast<std::size_t>(block)].path);
  return result;
}

// model.embed, model.layers.{0,1} (attention, experts.{0,1} with a module each), head
ModelBuilder mixture() {
  ModelBuilder b;
  b.linear(0, "embed", 64);
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1"}) {
    const int layer = b.block(layers, name, "Layer");
    const int experts = b.list(layer, "experts");
    b.block(experts, "0", "Expert");
    b.block(experts, "1", "Expert");
  }
  b.linear(0, "head", 64);
  return b;
}

TEST(BlockSearch, FindsRepeatedLayersAndNotTheExpertsInsideThem) {
  const ModelBuilder b = mixture();
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {})), ElementsAre("layers.0", "layers.1"));
}

TEST(BlockSearch, ANameInWrapDecidesInsteadOfRepetition) {
  const ModelBuilder b = mixture();
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {"Expert"})),
              ElementsAre("layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0",
                          "layers.1.experts.1"));
}

TEST(BlockSearch, OfNestedNamesTheOutermostIsTheBlock) {
  const ModelBuilder b = mixture();
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {"Expert", "Layer"})),
              ElementsAre("layers.0", "layers.1"));
}

TEST(BlockSearch, AnUnknownNameIsRefusedWithTheClassesThatThereAre) {
  const ModelBuilder b = mixture();
  try {
    find_blocks(b.tree, {"Layr"});
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'Layr'"));
    EXPECT_THAT(error.what(), HasSubstr("Expert, Layer, Linear, Model, ModuleList"));
  }
}

TEST(BlockSearch, EncoderAndDecoderAreTowersOfBlocksNotBlocks) {
  ModelBuilder b;
  for (const char* tower : {"encoder", "decoder"}) {
    const int stack = b.module(0, tower, "Stack");
    const int blocks = b.list(stack, "block");
    b.block(blocks, "0", "Block");
    b.block(blocks, "1", "Block");
  }
  EXPECT_THAT(
      paths(b.tree, find_blocks(b.tree, {})),
      ElementsAre("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"));
}

TEST(BlockSearch, ASequentialIsAContainerToo) {
  ModelBuilder b;
  const int stages = b.module(0, "stages", "Sequential");
  b.block(stages, "0", "Stage");
  b.block(stages, "1", "Stage");
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {})), ElementsAre("stages.0", "stages.1"));
}

TEST(BlockSearch, LayersOfAlternatingClassesAreFoundClassByClass) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (const auto& [name, type] :
       {std::pair{"0", "Mamba"}, {"1", "Attention"}, {"2", "Mamba"}, {"3", "Attention"}}) {
    b.block(layers, name, type);
  }
  EXPECT_EQ(find_blocks(b.tree, {}).size(), 4U);
}

TEST(BlockSearch, ModulesWithoutParametersOrAloneAreNoBlocks) {
  ModelBuilder b;
  const int layers = b.list(0, "layers");
  b.block(layers, "0", "Alone");
  for (const char* name : {"1", "2"}) b.module(b.module(layers, name, "Dropouts"), "p", "Dropout");
  b.linear(layers, "3", 64);  // no modules inside
  b.linear(layers, "4", 64);
  EXPECT_THAT(find_blocks(b.tree, {}), IsEmpty());
}

TEST(BlockSearch, ALeafClassIsABlockWhereItLiesInNoOther) {
  ModelBuilder b = mixture();
  b.block(0, "adapter", "Expert");
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {}, {.classes = {"Expert"}})),
              ElementsAre("layers.0", "layers.1", "adapter"));
}

TEST(BlockSearch, ALeafIsMarkedOrNamedAndHasNoBlocksInside) {
  ModelBuilder b = mixture();
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {}, {.names = {"layers.1.unknown", "layers"}})),
              ElementsAre("layers"));
  b.block(0, "adapter", "Adapter");
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {}, {.name_suffixes = {"apter"}})),
              ElementsAre("layers.0", "layers.1", "adapter"));
  b.tree.front().leaf = true;
  EXPECT_THAT(find_blocks(b.tree, {}), ElementsAre(0));
  EXPECT_THAT(find_named(b.tree, {}), ElementsAre(0));
}

TEST(BlockSearch, AClassMayBeNamedWithItsPythonModule) {
  ModelBuilder b;
  const int experts = b.module(0, "experts", "Expert");
  b.linear(experts, "up", 8);
  EXPECT_THAT(paths(b.tree, find_blocks(b.tree, {}, {.classes = {"package.modeling.Expert"}})),
              ElementsAre("experts"));
}

TEST(BlockSearch, NamedModulesAreTheOutermostOfTheirClasses) {
  const ModelBuilder b = mixture();
  EXPECT_THAT(paths(b.tree, find_named(b.tree, {"Expert", "some.Layer", "Unknown"})),
              ElementsAre("layers.0", "layers.1"));
  EXPECT_THAT(find_named(b.tree, {}), IsEmpty());
}

}  // namespace
}  // namespace strata::plan
