#include "strata/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace strata {
namespace {

using ::testing::HasSubstr;

TEST(Assertion, ThrowsInEveryBuildAndNamesTheExpression) {
  const int shards = 3;
  try {
    STRATA_ASSERT(shards == 4);
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("shards == 4"));
    EXPECT_THAT(error.what(), HasSubstr("error_test.cpp"));
  }
}

TEST(Assertion, EvaluatesTheExpressionOnceInEveryBuild) {
  int evaluations = 0;
  STRATA_ASSERT(++evaluations > 0);
  EXPECT_EQ(evaluations, 1);
}

}  // namespace
}  // namespace strata
