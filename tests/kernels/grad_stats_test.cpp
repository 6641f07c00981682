#include "strata/kernels/grad_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/every_target.h"
#include "kernels/references.h"
#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

TEST(SumOfSquares, EqualsTheReferenceBitForBitOnEveryTarget) {
  for_every_target([] {
    for (const std::size_t numel : kSizes) {
      for (const std::size_t offset : {0U, 1U}) {
        const auto numbers = plain_numbers(numel + offset, 1, 1e-3F);
        const auto gradients = std::span(numbers).subspan(offset);
        EXPECT_EQ(sum_of_squares(gradients, nullptr), sum_of_squares_reference(gradients)) << numel;
      }
    }
  });
}

TEST(SumOfSquares, DoesNotDependOnTheNumberOfThreads) {
  const auto gradients = plain_numbers(1'000'003, 2, 1.0F);
  const double expected = sum_of_squares(gradients, nullptr);
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(sum_of_squares(gradients, &pool), expected);
  }
}

TEST(SumOfSquares, IsExactWhereThatCanBeKnown) {
  const std::vector<float> gradients(100'000, 3.0F);
  EXPECT_EQ(sum_of_squares(gradients, nullptr), 900'000.0);
  EXPECT_EQ(sum_of_squares({}, nullptr), 0.0);
}

TEST(SumOfSquares, TheLargestAndSmallestNumbersNeitherOverflowNorVanish) {
  const std::vector<float> large(1000, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(sum_of_squares(large, nullptr)));
  const std::vector<float> small(1000, std::numeric_limits<float>::denorm_min());
  EXPECT_GT(sum_of_squares(small, nullptr), 0.0);
}

TEST(SumOfSquares, FindsOneBadElementWhereverItIs) {
  ThreadPool pool(2);
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  for_every_target([&] {
    for (const std::size_t at : {0U, 15U, 16U, 65535U, 65536U, 70000U}) {
      for (const float bad : kBad) {
        std::vector<float> gradients(70001, 1.0F);
        gradients[at] = bad;
        EXPECT_FALSE(std::isfinite(sum_of_squares(gradients, nullptr))) << at;
        EXPECT_FALSE(std::isfinite(sum_of_squares(gradients, &pool))) << at;
        EXPECT_FALSE(std::isfinite(sum_of_squares_reference(gradients))) << at;
      }
    }
  });
}

TEST(SumOfSquares, OppositeInfinitiesDoNotCancel) {
  const std::vector<float> gradients = {std::numeric_limits<float>::infinity(),
                                        -std::numeric_limits<float>::infinity()};
  EXPECT_FALSE(std::isfinite(sum_of_squares(gradients, nullptr)));
}

}  // namespace
}  // namespace strata::kernels
