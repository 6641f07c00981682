#include "strata/kernels/recipe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "every_target.h"
#include "kernels/references.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/recipe_scalars.h"

namespace strata::kernels {
namespace {

constexpr std::int64_t kElements = 70001;

Region everything() {
  return {Numel(), Numel(kElements), Numel(kElements), 1};
}

RecipeStep step(RecipeOp op, float a = 0.0F, float b = 0.0F, std::uint64_t key = 0) {
  return {op, a, b, key, everything()};
}

std::vector<float> replayed(const Recipe& recipe, std::int64_t begin = 0,
                            std::int64_t end = kElements) {
  std::vector<float> values(static_cast<std::size_t>(end - begin));
  replay(recipe, Numel(begin), Numel(end - begin), reinterpret_cast<std::byte*>(values.data()),
         DType::kFloat32, nullptr);
  return values;
}

// The operators of torch's trunc_normal_, then a row of zeroes, then a block of columns.
Recipe awkward_recipe() {
  Recipe recipe{step(RecipeOp::kUniform, -0.9544997F, 0.9544997F, 0x123456789ABCDEFULL),
                step(RecipeOp::kErfinv),
                step(RecipeOp::kMultiply, 0.02F * std::sqrt(2.0F)),
                step(RecipeOp::kAdd, 0.001F),
                step(RecipeOp::kClamp, -0.04F, 0.04F),
                step(RecipeOp::kFill, 0.0F),
                step(RecipeOp::kNormal, 0.5F, 3.0F, 77),
                step(RecipeOp::kDivide, 3.0F)};
  recipe[5].region = {Numel(701), Numel(100), Numel(100), 1};
  recipe[6].region = {Numel(9), Numel(33), Numel(101), 600};
  return recipe;
}

// The known answers that come with the Random123 library.
TEST(Recipe, PhiloxIsPhilox) {
  EXPECT_EQ(philox({0, 0, 0, 0}, 0),
            (PhiloxBlock{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  constexpr std::uint32_t kOnes = 0xffffffffU;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, ~std::uint64_t{0}),
            (PhiloxBlock{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
}

TEST(Recipe, FunctionsAreAccurate) {
  for (const float x : awkward_numbers(4000, 3)) {
    const float positive = std::abs(x);
    if (!std::isnormal(positive)) continue;
    const double wanted = std::log(static_cast<double>(positive));
    EXPECT_NEAR(natural_log(positive), wanted, 2e-7 * std::max(1.0, std::abs(wanted)));
  }
  for (int i = -9999; i < 10000; ++i) {
    const float x = static_cast<float>(i) / 10000.0F;
    EXPECT_NEAR(std::erf(static_cast<double>(inverse_erf(x))), x, 4e-7) << x;
  }
  EXPECT_EQ(inverse_erf(-1.0F), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(inverse_erf(1.5F)));
}

TEST(Recipe, EveryTargetAndEveryPieceHasTheBitsOfTheReference) {
  const Recipe recipe = awkward_recipe();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const std::size_t size = size_of(dtype).size();
    std::vector<std::byte> wanted(size * kElements);
    replay_reference(recipe, Numel(), Numel(kElements), wanted.data(), dtype);
    ThreadPool pool(3);
    for_every_target([&] {
      std::vector<std::byte> found(wanted.size());
      replay(recipe, Numel(), Numel(kElements), found.data(), dtype, &pool);
      EXPECT_EQ(std::memcmp(found.data(), wanted.data(), wanted.size()), 0);
      for (const std::int64_t piece : {1, 5, 4097, 30000}) {
        std::fill(found.begin(), found.end(), std::byte{0xFF});
        for (std::int64_t at = 0; at < kElements; at += piece * (piece < 9 ? 500 : 1)) {
          const std::int64_t count = std::min(piece, kElements - at);
          const std::size_t first = size * static_cast<std::size_t>(at);
          replay(recipe, Numel(at), Numel(count), found.data() + first, dtype, nullptr);
          EXPECT_EQ(std::memcmp(found.data() + first, wanted.data() + first,
                                size * static_cast<std::size_t>(count)),
                    0);
        }
      }
    });
  }
}

TEST(Recipe, BlocksOfWordsFarApartAndKeysDiffer) {
  const auto one = replayed({step(RecipeOp::kNormal, 0.0F, 1.0F, 1)});
  const auto other = replayed({step(RecipeOp::kNormal, 0.0F, 1.0F, 2)});
  EXPECT_NE(one, other);
  RecipeStep far = step(RecipeOp::kUniform, 0.0F, 1.0F, 1);
  far.region = {Numel(), Numel(std::int64_t{1} << 40), Numel(1), 1};
  const std::int64_t at = (std::int64_t{1} << 35) - 8;  // the number of the block passes 2^32
  std::vector<float> values(64);
  std::vector<float> wanted(64);
  replay({&far, 1}, Numel(at), Numel(64), reinterpret_cast<std::byte*>(values.data()),
         DType::kFloat32, nullptr);
  replay_reference({&far, 1}, Numel(at), Numel(64), reinterpret_cast<std::byte*>(wanted.data()),
                   DType::kFloat32);
  EXPECT_EQ(values, wanted);
}

// The largest distance between the distribution of values and the one wanted. With 70,001 of them
// it stays below 0.0074 in all but one of a thousand cases (1.95 / sqrt(n)).
template <typename Distribution>
double distance(std::vector<float> values, const Distribution& distribution) {
  std::ranges::sort(values);
  const auto n = static_cast<double>(values.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double wanted = distribution(values[i]);
    worst = std::max(
        {worst, wanted - static_cast<double>(i) / n, static_cast<double>(i + 1) / n - wanted});
  }
  return worst;
}

TEST(Recipe, DistributionsAreThoseAskedFor) {
  const auto normal = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  EXPECT_LT(distance(replayed({step(RecipeOp::kNormal, 1.0F, 2.0F, 5)}),
                     [&](double x) { return normal((x - 1.0) / 2.0); }),
            0.0074);
  const auto uniform = replayed({step(RecipeOp::kUniform, -1.0F, 3.0F, 6)});
  EXPECT_LT(distance(uniform, [](double x) { return (x + 1.0) / 4.0; }), 0.0074);
  EXPECT_GE(*std::ranges::min_element(uniform), -1.0F);
  EXPECT_LT(*std::ranges::max_element(uniform), 3.0F);
  const Recipe recipe = awkward_recipe();
  const double inside = normal(2.0) - normal(-2.0);
  EXPECT_LT(
      distance(replayed({recipe.begin(), recipe.begin() + 4}),
               [&](double x) { return (normal((x - 0.001) / 0.02) - normal(-2.0)) / inside; }),
      0.0074);
  // Neighbours, in a pair or not, have nothing to do with each other.
  const auto values = replayed({step(RecipeOp::kNormal, 0.0F, 1.0F, 9)});
  for (const std::size_t lag : {1U, 2U, 4U}) {
    double sum = 0.0;
    for (std::size_t i = 0; i + lag < values.size(); ++i) sum += values[i] * values[i + lag];
    EXPECT_LT(std::abs(sum / std::sqrt(static_cast<double>(kElements))), 4.0);
  }
}

TEST(Recipe, OtherDtypesAreRefused) {
  std::vector<std::byte> target(8);
  EXPECT_THROW(replay({}, Numel(), Numel(1), target.data(), DType::kFloat64, nullptr), UsageError);
}

}  // namespace
}  // namespace strata::kernels
