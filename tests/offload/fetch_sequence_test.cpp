#include <gtest/gtest.h>

#include <vector>

#include "strata/offload/nvme_store.h"

namespace strata::offload {
namespace {

Part part(int number) {
  return {number, 0_B, 4096_B};
}

// Fetches, and says how many of them followed.
int run(FetchSequence& sequence, const std::vector<int>& fetches) {
  int expected = 0;
  for (const int number : fetches) {
    const auto next = sequence.following();
    if (next == part(number)) ++expected;
    sequence.record(part(number));
  }
  return expected;
}

TEST(FetchSequence, KnowsARoundFromTheSecondOnAndThatItBeginsAgain) {
  FetchSequence sequence;
  const std::vector<int> round{1, 2, 3, 4};
  EXPECT_EQ(run(sequence, round), 0);
  EXPECT_EQ(run(sequence, round), 3);
  EXPECT_EQ(run(sequence, round), 4);
}

TEST(FetchSequence, TellsTwoUsesOfOnePartByWhatCameBefore) {
  FetchSequence sequence;
  const std::vector<int> round{1, 7, 8, 1, 2, 7, 9, 2};
  run(sequence, round);
  run(sequence, round);
  EXPECT_EQ(run(sequence, round), 8);
}

TEST(FetchSequence, SaysWhatIsNotExpectedAnyMoreWhenTheOrderChanges) {
  FetchSequence sequence;
  run(sequence, {1, 2, 3, 4, 5, 1});
  for (int i = 0; i < 3; ++i) sequence.predict_following();
  EXPECT_EQ(sequence.following(), part(5));
  EXPECT_EQ(sequence.record(part(3)), std::vector<Part>{part(2)});
  EXPECT_EQ(sequence.following(), part(5));
  EXPECT_EQ(sequence.record(part(9)), std::vector<Part>{part(4)});
  EXPECT_EQ(sequence.following(), std::nullopt);
  EXPECT_TRUE(sequence.record(part(1)).empty());
  EXPECT_EQ(sequence.following(), part(3)) << "what came after 1 last";
}

}  // namespace
}  // namespace strata::offload
