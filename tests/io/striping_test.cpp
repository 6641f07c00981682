#include "strata/io/striping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

#include "strata/base/error.h"

namespace strata::testing {
namespace {

using io::Striping;

TEST(Striping, EveryByteLiesOnceWhateverTheRange) {
  constexpr std::int64_t kBytes = 5000;
  const Striping striping({1, 2.5, 0.7}, 96_B);
  // The place of each byte, from ranges of one byte.
  std::vector<std::pair<std::size_t, std::int64_t>> places;
  for (std::int64_t byte = 0; byte < kBytes; ++byte) {
    const auto runs = striping.runs_of(Bytes(byte), 1_B);
    ASSERT_EQ(runs.size(), 1U);
    places.emplace_back(runs[0].part, runs[0].offset.value);
  }
  EXPECT_EQ(std::set(places.begin(), places.end()).size(), places.size());
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const auto offset = static_cast<std::int64_t>(random() % kBytes);
    const std::int64_t bytes = static_cast<std::int64_t>(random()) % (kBytes - offset + 1);
    std::int64_t at = 0;
    for (const Striping::Run& run : striping.runs_of(Bytes(offset), Bytes(bytes))) {
      ASSERT_EQ(run.begin.value, at);
      for (std::int64_t i = 0; i < run.bytes.value; ++i) {
        const auto& place = places[static_cast<std::size_t>(offset + at + i)];
        ASSERT_EQ(place, std::pair(run.part, run.offset.value + i));
      }
      at += run.bytes.value;
    }
    ASSERT_EQ(at, bytes);
  }
  EXPECT_TRUE(striping.runs_of(Bytes(kBytes), 0_B).empty());
}

TEST(Striping, SharesAreWhatTheFirstBytesNeed) {
  const Striping striping({1, 2.5, 0.7}, 96_B);
  std::vector<Bytes> ends(striping.parts());
  for (std::int64_t bytes = 0; bytes < 3000; ++bytes) {
    for (std::size_t part = 0; part < ends.size(); ++part)
      ASSERT_EQ(striping.share_of(part, Bytes(bytes)), ends[part]) << bytes << " bytes";
    ++ends[striping.runs_of(Bytes(bytes), 1_B)[0].part].value;
  }
}

TEST(Striping, FasterDrivesGetMore) {
  const Striping two({3000, 1000}, 10_B);
  EXPECT_EQ(two.share_of(0, 8000_B), 6000_B);
  EXPECT_EQ(two.share_of(1, 8000_B), 2000_B);
  const Striping three({1, 1, 1}, 10_B);
  EXPECT_EQ(three.share_of(0, 95_B), 35_B);
  EXPECT_EQ(three.share_of(2, 95_B), 30_B);
  const Striping slow({1000, 1}, 10_B);
  EXPECT_EQ(slow.share_of(1, 1700_B), 100_B)
      << "a part that is very slow has its place all the same";
}

TEST(Striping, OnePartIsTheRangeItself) {
  const auto runs = Striping({7}, 10_B).runs_of(5_B, 777_B);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].offset, 5_B);
  EXPECT_EQ(runs[0].bytes, 777_B);
}

TEST(Striping, RefusesWhatCannotBeMeant) {
  EXPECT_THROW(Striping({}, 1_B), UsageError);
  EXPECT_THROW(Striping({1, 0}, 1_B), UsageError);
  EXPECT_THROW(Striping({1, std::numeric_limits<double>::infinity()}, 1_B), UsageError);
  EXPECT_THROW(Striping({1}, 0_B), UsageError);
}

}  // namespace
}  // namespace strata::testing
