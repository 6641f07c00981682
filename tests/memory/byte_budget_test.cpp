#include "strata/memory/byte_budget.h"

#include <gtest/gtest.h>

#include <utility>

namespace strata::memory {
namespace {

TEST(ByteBudget, GivesUntilItsLimitAndTakesBack) {
  const auto budget = ByteBudget::create(100_B);
  auto first = budget->take(60_B);
  ASSERT_TRUE(first);
  EXPECT_EQ(budget->left(), 40_B);
  EXPECT_FALSE(budget->take(41_B));
  auto second = budget->take(40_B);
  ASSERT_TRUE(second);
  EXPECT_EQ(budget->left(), 0_B);
  first.reset();
  EXPECT_EQ(budget->left(), 60_B);
}

TEST(ByteBudget, ARefusalTakesNothing) {
  const auto budget = ByteBudget::create(10_B);
  EXPECT_FALSE(budget->take(11_B));
  EXPECT_EQ(budget->left(), 10_B);
}

TEST(ByteBudget, AMovedHoldIsGivenBackOnce) {
  const auto budget = ByteBudget::create(10_B);
  ByteBudget::Hold outer;
  {
    ByteBudget::Hold inner = std::move(*budget->take(4_B));
    outer = std::move(inner);
  }
  EXPECT_EQ(budget->left(), 6_B);
  outer = ByteBudget::Hold();
  EXPECT_EQ(budget->left(), 10_B);
}

TEST(ByteBudget, AHoldMayOutliveEveryOtherOwner) {
  auto budget = ByteBudget::create(10_B);
  auto hold = budget->take(4_B);
  budget.reset();
  hold.reset();
}

}  // namespace
}  // namespace strata::memory
