#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "strata/format/sharded_writer.h"

namespace strata::testing {
namespace {

using format::RangeCover;
using format::Span1d;

TEST(RangeCover, AnEmptyOneIsComplete) {
  EXPECT_EQ(RangeCover(0).first_gap(), std::nullopt);
}

TEST(RangeCover, NamesTheFirstGap) {
  RangeCover cover(10);
  EXPECT_EQ(cover.first_gap(), (Span1d{0, 10}));
  EXPECT_EQ(cover.claim({4, 6}), std::nullopt);
  EXPECT_EQ(cover.first_gap(), (Span1d{0, 4}));
  EXPECT_EQ(cover.claim({0, 4}), std::nullopt);
  EXPECT_EQ(cover.first_gap(), (Span1d{6, 10}));
  EXPECT_EQ(cover.claim({8, 9}), std::nullopt);
  EXPECT_EQ(cover.first_gap(), (Span1d{6, 8}));
}

TEST(RangeCover, RefusesWhatIsClaimedAndSaysWhichPart) {
  RangeCover cover(10);
  cover.claim({3, 6});
  EXPECT_EQ(cover.claim({0, 10}), (Span1d{3, 6}));
  EXPECT_EQ(cover.claim({5, 8}), (Span1d{5, 6}));
  EXPECT_EQ(cover.claim({0, 4}), (Span1d{3, 4}));
  EXPECT_EQ(cover.claim({4, 5}), (Span1d{4, 5}));
  EXPECT_EQ(cover.claimed(), 3);
  EXPECT_EQ(cover.claim({4, 4}), std::nullopt);
}

TEST(RangeCover, AgreesWithAListOfFlagsOnRandomClaims) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 24);
    RangeCover cover(size);
    std::vector<bool> flags(static_cast<std::size_t>(size), false);
    for (int step = 0; step < 20; ++step) {
      Span1d span;
      span.begin = static_cast<std::int64_t>(random()) % (size + 1);
      span.end = span.begin + static_cast<std::int64_t>(random() % 6) % (size - span.begin + 1);
      bool taken = false;
      for (auto i = span.begin; i < span.end; ++i) taken |= flags[static_cast<std::size_t>(i)];
      ASSERT_EQ(cover.claim(span).has_value(), taken);
      for (auto i = span.begin; !taken && i < span.end; ++i)
        flags[static_cast<std::size_t>(i)] = true;
      std::int64_t count = 0;
      std::int64_t first = size;
      for (auto i = size; i-- > 0;) {
        if (flags[static_cast<std::size_t>(i)]) {
          ++count;
        } else {
          first = i;
        }
      }
      ASSERT_EQ(cover.claimed(), count);
      ASSERT_EQ(cover.first_gap().has_value(), count < size);
      ASSERT_EQ(cover.first_gap() ? cover.first_gap()->begin : size, first);
    }
  }
}

}  // namespace
}  // namespace strata::testing
