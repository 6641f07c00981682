#include <gmock/gmock.h>

#include <tuple>

#include "engine/checkpoint/checkpoint_model.h"
#include "kernels/references.h"
#include "strata/base/error.h"
#include "strata/engine/checkpoint/weight_loader.h"

namespace strata::engine {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::RankModel;

// Each parameter's own random numbers, and a range of them set.
std::vector<ParamRecipe> recipes_of(const RankModel& rank, DType dtype) {
  std::vector<ParamRecipe> recipes;
  for (std::size_t p = 0; p < rank.params.size(); ++p) {
    const Numel all = rank.params[p].numel();
    kernels::Recipe recipe{
        {kernels::RecipeOp::kNormal, 0.0F, 0.02F, 100 + p, {Numel(), all, all, 1}},
        {kernels::RecipeOp::kFill, 7.0F, 0.0F, 0, {Numel(2), Numel(1), Numel(1), 1}}};
    recipes.push_back({static_cast<int>(p), std::move(recipe), dtype});
  }
  return recipes;
}

std::vector<std::byte> expected(const ParamRecipe& recipe, Numel numel, DType dtype) {
  std::vector<std::byte> values(bytes_of(numel, recipe.dtype).size());
  kernels::replay_reference(recipe.recipe, Numel(), numel, values.data(), recipe.dtype);
  std::vector<std::byte> cast(bytes_of(numel, dtype).size());
  device::CpuDevice device;
  device.cast(cast.data(), dtype, values.data(), recipe.dtype, numel, device.compute_stream());
  return cast;
}

// world, stage, dtype of the values, dtype of the weights
class WeightReplay : public ::testing::TestWithParam<std::tuple<int, int, DType, DType>> {};

TEST_P(WeightReplay, MakesEveryParameterOnEveryRankWithinTwoPieces) {
  const auto world = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const auto values_dtype = std::get<2>(GetParam());
  const auto dtype = std::get<3>(GetParam());
  const auto outcomes = testing::on_ranks(world, [&](const auto& ranks) {
    RankModel rank(ranks, dtype, stage);
    ThreadPool threads(2);
    const std::vector<ParamRecipe> recipes = recipes_of(rank, values_dtype);
    replay_weights(*rank.model, recipes, 1000_B, threads);
    rank.model->weights_changed();
    for (std::size_t p = 0; p < rank.params.size(); ++p) {
      EXPECT_EQ(rank.values(static_cast<int>(p)),
                expected(recipes[p], rank.params[p].numel(), dtype))
          << rank.params[p].name;
    }
    EXPECT_LE(rank.device->ledger()->peak(memory::Tier::kHost), 4_KiB) << "two pieces";
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

INSTANTIATE_TEST_SUITE_P(Worlds, WeightReplay,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(2, 3),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16)));

TEST(WeightReplay, APieceThatNobodyHasRoomForIsAnErrorOnEveryRank) {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    ThreadPool threads(1);
    replay_weights(*rank.model, recipes_of(rank, DType::kFloat32), Bytes(std::int64_t{1} << 60),
                   threads);
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("threw: ")));
}

}  // namespace
}  // namespace strata::engine
