#include "strata/kernels/grad_stats.h"

#include <gtest/gtest.h>

#include <limits>

#include "kernels/every_target.h"
#include "kernels/references.h"
#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

TEST(GradStats, EqualsTheReferenceBitForBitOnEveryTarget) {
  for_every_target([] {
    for (const std::size_t numel : kSizes) {
      for (const std::size_t offset : {0U, 1U}) {
        const auto numbers = plain_numbers(numel + offset, 1, 1e-3F);
        const auto gradients = std::span(numbers).subspan(offset);
        const GradStats expected = grad_stats_reference(gradients);
        const GradStats found = grad_stats(gradients, nullptr);
        EXPECT_EQ(found.sum_of_squares, expected.sum_of_squares) << numel;
        EXPECT_TRUE(found.finite);
      }
    }
  });
}

TEST(GradStats, DoesNotDependOnTheNumberOfThreads) {
  const auto gradients = plain_numbers(1'000'003, 2, 1.0F);
  const double expected = grad_stats(gradients, nullptr).sum_of_squares;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(grad_stats(gradients, &pool).sum_of_squares, expected);
  }
}

TEST(GradStats, IsExactWhereThatCanBeKnown) {
  const std::vector<float> gradients(100'000, 3.0F);
  EXPECT_EQ(grad_stats(gradients, nullptr).sum_of_squares, 900'000.0);
  EXPECT_EQ(grad_stats({}, nullptr).sum_of_squares, 0.0);
  EXPECT_TRUE(grad_stats({}, nullptr).finite);
}

TEST(GradStats, TheLargestAndSmallestNumbersNeitherOverflowNorVanish) {
  const std::vector<float> large(1000, std::numeric_limits<float>::max());
  EXPECT_TRUE(grad_stats(large, nullptr).finite);
  const std::vector<float> small(1000, std::numeric_limits<float>::denorm_min());
  EXPECT_GT(grad_stats(small, nullptr).sum_of_squares, 0.0);
}

TEST(GradStats, FindsOneBadElementWhereverItIs) {
  ThreadPool pool(2);
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  for_every_target([&] {
    for (const std::size_t at : {0U, 15U, 16U, 65535U, 65536U, 70000U}) {
      for (const float bad : kBad) {
        std::vector<float> gradients(70001, 1.0F);
        gradients[at] = bad;
        EXPECT_FALSE(grad_stats(gradients, nullptr).finite) << at;
        EXPECT_FALSE(grad_stats(gradients, &pool).finite) << at;
        EXPECT_FALSE(grad_stats_reference(gradients).finite) << at;
      }
    }
  });
}

TEST(GradStats, OppositeInfinitiesDoNotCancel) {
  const std::vector<float> gradients = {std::numeric_limits<float>::infinity(),
                                        -std::numeric_limits<float>::infinity()};
  EXPECT_FALSE(grad_stats(gradients, nullptr).finite);
}

}  // namespace
}  // namespace strata::kernels
