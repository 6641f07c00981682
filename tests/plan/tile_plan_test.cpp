#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "plan/model_builder.h"
#include "strata/base/error.h"
#include "strata/plan/param_spec.h"
#include "strata/plan/unit_plan.h"

namespace strata::plan {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tiles = std::vector<RowRange>;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

std::string refusal(const Tiles& tiles) {
  return error_of([&] { require_tiles("head.weight", 10, 4_B, 20_B, tiles); });
}

TEST(TilePlan, TilesAreAsFewAsTheBudgetAllowsAndOfOneSize) {
  EXPECT_THAT(cut_rows("w", 10, 4_B, 40_B), ElementsAre(RowRange{0, 10}));
  EXPECT_THAT(cut_rows("w", 10, 4_B, 36_B), ElementsAre(RowRange{0, 5}, RowRange{5, 10}));
  EXPECT_THAT(cut_rows("w", 11, 4_B, 20_B),
              ElementsAre(RowRange{0, 4}, RowRange{4, 8}, RowRange{8, 11}));
  EXPECT_THAT(cut_rows("w", 3, 4_B, 4_B),
              ElementsAre(RowRange{0, 1}, RowRange{1, 2}, RowRange{2, 3}));
}

TEST(TilePlan, RowsAreRoundWhereTheBudgetAllows) {
  // Two tiles of 150 rows would do; 256 fit.
  EXPECT_THAT(cut_rows("w", 300, 4_B, 1040_B), ElementsAre(RowRange{0, 256}, RowRange{256, 300}));
  // 200 fit, 256 do not.
  EXPECT_THAT(cut_rows("w", 300, 4_B, 800_B), ElementsAre(RowRange{0, 150}, RowRange{150, 300}));
}

TEST(TilePlan, NoTileExceedsTheBudgetAndAllHoldEveryRow) {
  for (std::int64_t rows = 1; rows < 700; rows += 13) {
    for (std::int64_t most = 8; most < 4000; most += 97) {
      const Tiles tiles = cut_rows("w", rows, 8_B, Bytes(most));
      EXPECT_EQ(error_of([&] { require_tiles("w", rows, 8_B, Bytes(most), tiles); }), "");
    }
  }
}

TEST(TilePlan, WithoutRowsOrBytesThereIsNothingToCut) {
  EXPECT_TRUE(cut_rows("w", 0, 4_B, 8_B).empty());
  EXPECT_THAT(cut_rows("w", 5, 0_B, 8_B), ElementsAre(RowRange{0, 5}));
}

TEST(TilePlan, ABudgetBelowOneRowIsRefusedWithItsNumbers) {
  EXPECT_THAT(error_of([] { cut_rows("head.weight", 10, 400_B, 399_B); }),
              AllOf(HasSubstr("strata.tiles.max_gather"), HasSubstr("'head.weight'"),
                    HasSubstr("400 or more; found 399")));
}

TEST(TilePlan, ARuleMustHoldEveryRowOnce) {
  EXPECT_EQ(refusal({{0, 5}, {5, 10}}), "");
  EXPECT_THAT(refusal({{0, 5}, {4, 9}}),
              AllOf(HasSubstr("'head.weight'"), HasSubstr("overlap"), HasSubstr("rows 4 to 9")));
  EXPECT_THAT(refusal({{0, 5}, {6, 10}}), HasSubstr("rows from 5 on are in no tile"));
  EXPECT_THAT(refusal({{0, 5}}), HasSubstr("the last rows are in no tile: rows 5 to 10"));
  EXPECT_THAT(refusal({{0, 5}, {5, 5}, {5, 10}}), HasSubstr("a tile is empty"));
  EXPECT_THAT(refusal({{0, 5}, {5, 10}, {10, 12}}), HasSubstr("behind the last row"));
  EXPECT_THAT(refusal({{0, 6}, {6, 10}}), HasSubstr("a tile is larger: rows 0 to 6"));
}

TEST(TilePlan, PatternsSayWhichOfTheLargeParametersAreCut) {
  const std::vector<std::string> heads = {"*head*", "model.embed.*"};
  EXPECT_TRUE(wants_tiles("anything", 9_B, 8_B, {}));
  EXPECT_FALSE(wants_tiles("anything", 8_B, 8_B, {}));
  EXPECT_TRUE(wants_tiles("lm_head.weight", 9_B, 8_B, heads));
  EXPECT_FALSE(wants_tiles("lm_head.weight", 8_B, 8_B, heads));
  EXPECT_FALSE(wants_tiles("model.layers.0.up.weight", 9_B, 8_B, heads));
}

TEST(TilePlan, TilesAreUnitsByThemselvesWhichScopesUseInTheirOrder) {
  ModelBuilder b;
  const int embed = b.module(0, "embed", "Embedding");
  for (int i = 0; i < 2; ++i) {
    const int tile = b.param(embed, "weight" + std::to_string(i), 4);
    b.params[static_cast<std::size_t>(tile)].tile = TileOf{"embed.weight", {8}, Numel(4 * i), 2};
  }
  b.linear(0, "middle", 4);
  const int head = b.linear(0, "head", 4);
  b.tie(head, 0);
  b.tie(head, 1);
  PlanOptions options;
  options.persistence_threshold = Numel(4);
  const ModelPlan plan = plan_units(b.params, b.tree, options);
  ASSERT_EQ(plan.units.size(), 3U);
  EXPECT_EQ(plan.units[0].name, "embed.weight0");
  EXPECT_EQ(plan.units[1].name, "embed.weight1");
  EXPECT_EQ(plan.units[0].tile_uses, 2);
  EXPECT_FALSE(plan.units[0].persistent);
  EXPECT_TRUE(plan.units[2].persistent);
  ASSERT_EQ(plan.scopes.size(), 3U);
  EXPECT_THAT(plan.scopes[0].units, ElementsAre());
  EXPECT_THAT(plan.scopes[0].tiles, ElementsAre(0, 1));
  EXPECT_THAT(plan.scopes[2].units, ElementsAre(2));
  EXPECT_THAT(plan.scopes[2].tiles, ElementsAre(0, 1));
}

}  // namespace
}  // namespace strata::plan
