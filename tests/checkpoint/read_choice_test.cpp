#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/direct_transfers.h"
#include "io/temporary_folder.h"
#include "strata/checkpoint/reader.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {
namespace {

using checkpoint::choose_read;
using checkpoint::ReadFigures;
using checkpoint::ReadWay;
using checkpoint::wants_probe;
using ::testing::HasSubstr;

constexpr ReadFigures probed(double cached, double buffered, double direct) {
  return {.direct_offered = true,
          .cached = cached,
          .buffered_gb_per_s = buffered,
          .direct_gb_per_s = direct};
}

TEST(ReadChoice, TakesTheFasterWayOfWhatIsNotCached) {
  EXPECT_TRUE(choose_read(ReadWay::kAuto, probed(0.0, 1.0, 2.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kAuto, probed(0.0, 2.0, 1.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kAuto, probed(0.0, 1.0, 1.05)).direct) << "hardly faster";
}

TEST(ReadChoice, WhatIsCachedCountsForTheCache) {
  EXPECT_TRUE(choose_read(ReadWay::kAuto, probed(0.25, 1.0, 2.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kAuto, probed(0.5, 1.0, 2.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kAuto, probed(1.0, 1.0, 100.0)).direct);
}

TEST(ReadChoice, SaysWhatItRestsOn) {
  EXPECT_EQ(choose_read(ReadWay::kAuto, probed(0.25, 1.0, 2.5)).reason,
            "25% cached; probe: 1.00 GB/s buffered, 2.50 direct");
  EXPECT_EQ(choose_read(ReadWay::kAuto, probed(1.0, 1.0, 2.5)).reason, "100% cached");
  EXPECT_THAT(choose_read(ReadWay::kAuto, {.direct_offered = true}).reason,
              HasSubstr("too little to probe"));
  EXPECT_EQ(choose_read(ReadWay::kDirect, {}).reason, "no direct reads to be had here");
  EXPECT_EQ(choose_read(ReadWay::kDirect, {.direct_offered = true}).reason, "as configured");
}

TEST(ReadChoice, DoesAsItIsToldWhereThatIsPossible) {
  EXPECT_TRUE(choose_read(ReadWay::kDirect, probed(1.0, 9.0, 1.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kBuffered, probed(0.0, 1.0, 9.0)).direct);
  EXPECT_FALSE(choose_read(ReadWay::kDirect, {}).direct);
  EXPECT_FALSE(choose_read(ReadWay::kAuto, {}).direct);
}

TEST(ReadChoice, ProbesOnlyWhereThatCanDecide) {
  EXPECT_TRUE(wants_probe(ReadWay::kAuto, {.direct_offered = true}));
  EXPECT_TRUE(wants_probe(ReadWay::kAuto, {.direct_offered = true, .cached = 0.5}));
  EXPECT_FALSE(wants_probe(ReadWay::kAuto, {.direct_offered = true, .cached = 0.95}));
  EXPECT_FALSE(wants_probe(ReadWay::kAuto, {.direct_offered = false, .cached = 0.0}));
  EXPECT_FALSE(wants_probe(ReadWay::kDirect, {.direct_offered = true, .cached = 0.0}));
}

// A file of 2 MiB that was just written, and so is in the page cache.
class ReadProbe : public ::testing::Test {
 protected:
  ReadProbe() {
    io::File fresh(folder_ / "data", io::File::Mode::kCreate);
    io::write_fully(fresh, 0_B, patterned_bytes((2_MiB).size(), 1));
    fresh.sync();
    file_.emplace(folder_ / "data", io::File::Mode::kRead);
    direct_.emplace(file_->direct());
    ways_ = {{&*file_, &*direct_}};
  }
  checkpoint::ReadProbe probe() const {
    return {ways_, ranges_, {.samples = 16, .piece = 128_KiB, .pieces = 2, .least = 1_MiB}};
  }

  TemporaryFolder folder_;
  std::optional<io::File> file_;
  std::optional<io::File> direct_;
  std::vector<checkpoint::ReadableFile> ways_;
  std::vector<checkpoint::FileRange> ranges_{{0, 3_B, 1_MiB}, {0, 1_MiB + 70_KiB, 900_KiB}};
  checkpoint::TransferRing ring_{{2, 64_KiB}, nullptr};
  io::ThreadEngine io_;
};

TEST_F(ReadProbe, FindsAWarmFileInThePageCache) {
  if (!io::in_page_cache(*file_, 0_B).has_value())
    return;  // this system does not tell, which is no error
  for (const Bytes offset : {0_B, 1_MiB, 2_MiB - 1_B})
    EXPECT_TRUE(*io::in_page_cache(*file_, offset));
  EXPECT_EQ(probe().look().cached, 1.0);
  const checkpoint::ReadChoice choice = probe().choose(ReadWay::kAuto, io_, ring_);
  EXPECT_FALSE(choice.direct);
  EXPECT_FALSE(choice.figures.direct_gb_per_s.has_value()) << "nothing to be timed";
}

TEST_F(ReadProbe, SaysWhetherTheFileSystemHasDirectTransfers) {
  EXPECT_EQ(probe().look().direct_offered, direct_->direct_fd() >= 0);
  ways_[0].direct = &*file_;
  EXPECT_FALSE(probe().look().direct_offered);
  EXPECT_FALSE(probe().choose(ReadWay::kDirect, io_, ring_).direct);
}

TEST_F(ReadProbe, TimesBothWaysWhereThereAreEnoughColdPieces) {
  ASSERT_EQ(::posix_fadvise(file_->fd(), 0, 0, POSIX_FADV_DONTNEED), 0);
  ReadFigures figures = probe().look();  // systems may keep pages all the same
  const bool cold = figures.cached == 0.0 && figures.direct_offered;
  probe().time_reads(figures, io_, ring_);
  EXPECT_EQ(figures.buffered_gb_per_s.has_value(), figures.direct_gb_per_s.has_value());
  if (cold) {
    ASSERT_TRUE(figures.direct_gb_per_s.has_value());
    EXPECT_GT(*figures.direct_gb_per_s, 0.0);
    EXPECT_GT(*figures.buffered_gb_per_s, 0.0);
  }
}

TEST_F(ReadProbe, TimesNothingWhereLittleIsToBeRead) {
  ASSERT_EQ(::posix_fadvise(file_->fd(), 0, 0, POSIX_FADV_DONTNEED), 0);
  ranges_ = {{0, 0_B, 64_KiB}};
  EXPECT_FALSE(probe().choose(ReadWay::kAuto, io_, ring_).figures.buffered_gb_per_s.has_value());
  ranges_.clear();
  EXPECT_FALSE(probe().choose(ReadWay::kAuto, io_, ring_).direct);
}

}  // namespace
}  // namespace strata::testing
