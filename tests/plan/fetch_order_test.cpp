#include "strata/plan/fetch_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace strata::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

void use(FetchOrder& order, const std::vector<int>& units) {
  for (const int unit : units) order.record_use(unit);
}

void pass(FetchOrder& order, const std::vector<int>& units) {
  order.start_pass();
  use(order, units);
}

std::vector<int> upcoming(const FetchOrder& order) {
  return {order.upcoming().begin(), order.upcoming().end()};
}

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

TEST(FetchOrder, ExpectsRegistrationOrderForwardsAndBackwardsAtFirst) {
  FetchOrder order(3);
  EXPECT_THAT(upcoming(order), ElementsAre(0, 1, 2, 2, 1, 0));
  use(order, {0, 1});
  EXPECT_EQ(order.distance(2), 0);
  EXPECT_EQ(order.distance(1), 2);
  EXPECT_EQ(order.distance(0), 3);
}

TEST(FetchOrder, ExpectsWhatTheLastPassDid) {
  FetchOrder order(4);
  pass(order, {2, 0, 3, 0, 2});
  order.start_pass();
  EXPECT_THAT(upcoming(order), ElementsAre(2, 0, 3, 0, 2));
  use(order, {2, 0});
  EXPECT_THAT(upcoming(order), ElementsAre(3, 0, 2));
  EXPECT_EQ(order.distance(2), 2);
  EXPECT_EQ(order.distance(1), kNever);
}

TEST(FetchOrder, AUnitUsedTwiceInARowIsOneUse) {
  FetchOrder order(2);
  pass(order, {0, 0, 1, 1, 1, 0});
  order.start_pass();
  EXPECT_THAT(upcoming(order), ElementsAre(0, 1, 0));
}

TEST(FetchOrder, APassWithoutUsesForgetsNothing) {
  FetchOrder order(2);
  pass(order, {1, 0});
  order.start_pass();
  order.start_pass();
  EXPECT_THAT(upcoming(order), ElementsAre(1, 0));
}

TEST(FetchOrder, ASkippedUseIsSteppedOver) {
  FetchOrder order(4);
  pass(order, {0, 1, 2, 3});
  pass(order, {0, 2});
  EXPECT_THAT(upcoming(order), ElementsAre(3));
}

TEST(FetchOrder, AnUnexpectedUseLeavesThePosition) {
  FetchOrder order(4);
  pass(order, {0, 1, 2});
  pass(order, {0, 3});
  EXPECT_THAT(upcoming(order), ElementsAre(1, 2));
}

TEST(FetchOrder, TwoUsesInARowFindThePositionAgain) {
  FetchOrder order(4);
  const std::vector<int> training{0, 1, 2, 3, 2, 1, 0};
  pass(order, training);
  // Evaluation before the same pass, without a start between them: one forward after the other.
  pass(order, {0, 1, 2, 3});
  use(order, {0});
  use(order, {1});
  EXPECT_THAT(upcoming(order), ElementsAre(2, 3, 2, 1, 0));
  use(order, {2, 3, 2});
  EXPECT_THAT(upcoming(order), ElementsAre(1, 0));
}

TEST(FetchOrder, AJumpForwardIsUndoneWhenItWasWrong) {
  FetchOrder order(5);
  pass(order, {0, 1, 2, 3, 4, 2, 1, 0});
  pass(order, {0, 4});  // out of order: the position jumps behind 4
  EXPECT_THAT(upcoming(order), ElementsAre(2, 1, 0));
  use(order, {1, 2});
  EXPECT_THAT(upcoming(order), ElementsAre(3, 4, 2, 1, 0));
}

TEST(FetchOrder, TellsTheOrderOfFirstUses) {
  FetchOrder order(4);
  pass(order, {2, 0, 2, 1, 0});
  EXPECT_THAT(order.first_uses(), ElementsAre(2, 0, 1));
  order.start_pass();
  EXPECT_THAT(order.first_uses(), IsEmpty());
}

TEST(FetchOrder, RemembersTheEndOfAVeryLongPass) {
  FetchOrder order(8);
  order.start_pass();
  for (int i = 0; i < 40'000; ++i) use(order, {0, 1, 2, 3});
  use(order, {4, 5, 6, 7});
  order.start_pass();
  EXPECT_LE(upcoming(order).size(), std::size_t{1} << 16);
  use(order, {3, 4});
  EXPECT_THAT(upcoming(order), ElementsAre(5, 6, 7));
}

}  // namespace
}  // namespace strata::plan
