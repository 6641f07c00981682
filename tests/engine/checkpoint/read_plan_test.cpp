// plan_reads(): which reads serve which copies.
#include <gtest/gtest.h>

#include "strata/engine/checkpoint/weight_loader.h"

namespace strata::engine {
namespace {

format::RangeCopy copy_of(std::int64_t offset, DType dtype, std::int64_t numel) {
  return {0, Bytes(offset), dtype, 0, Numel(), Numel(numel)};
}

TEST(PlanReads, ReadsNeighboursTogetherAndCutsWhatIsLarge) {
  const std::vector<format::RangeCopy> copies{copy_of(100, DType::kFloat32, 10),
                                              copy_of(148, DType::kFloat32, 5),
                                              copy_of(1 << 20, DType::kFloat32, 300)};
  const ReadPlan plan = plan_reads(copies, 512_B);
  ASSERT_EQ(plan.reads.size(), 4U);
  EXPECT_EQ(plan.reads[0].offset, 100_B);
  EXPECT_EQ(plan.reads[0].bytes, 68_B);
  EXPECT_EQ(plan.ends[0], 2U);
  EXPECT_EQ(plan.reads[1].bytes, 512_B);
  EXPECT_EQ(plan.reads[3].bytes, 176_B);
  EXPECT_EQ(plan.pieces.back().param_begin, Numel(256));
}

TEST(PlanReads, BeginsAtBlocksAndCutsSoThatTheNextReadDoes) {
  const std::vector<format::RangeCopy> copies{copy_of(4100, DType::kFloat32, 5000),
                                              copy_of(24200, DType::kFloat32, 10)};
  const ReadPlan plan = plan_reads(copies, 8_KiB, 4_KiB);
  ASSERT_EQ(plan.reads.size(), 3U);
  EXPECT_EQ(plan.reads[0].offset, 4096_B);
  EXPECT_EQ(plan.reads[0].bytes, 8_KiB) << "with the four bytes before the first element";
  EXPECT_EQ(plan.pieces[0].numel, Numel(2047));
  EXPECT_EQ(plan.reads[1].offset, 12288_B);
  EXPECT_EQ(plan.pieces[1].offset, 12288_B);
  EXPECT_EQ(plan.reads[2].offset, 20480_B);
  EXPECT_EQ(plan.ends[2] - plan.ends[1], 2U);
  EXPECT_EQ(plan.reads[2].bytes, Bytes(24240 - 20480));
}

TEST(PlanReads, BeginsWhereElementsDoThatLieBesideTheirMultiples) {
  const std::vector<format::RangeCopy> copies{copy_of(5001, DType::kFloat32, 3000)};
  const ReadPlan plan = plan_reads(copies, 8_KiB, 4_KiB);
  ASSERT_EQ(plan.reads.size(), 2U);
  EXPECT_EQ(plan.reads[0].offset, 5001_B);
  EXPECT_EQ(plan.reads[0].bytes, 8_KiB);
}

TEST(PlanReads, KeepsElementsAlignedWhereTheFileDoesNot) {
  const std::vector<format::RangeCopy> copies{copy_of(101, DType::kBFloat16, 2),
                                              copy_of(106, DType::kFloat32, 2),
                                              copy_of(114, DType::kFloat32, 2)};
  const ReadPlan plan = plan_reads(copies, 512_B);
  ASSERT_EQ(plan.reads.size(), 2U);
  EXPECT_EQ(plan.reads[1].offset, 106_B);
  EXPECT_EQ(plan.ends[1] - plan.ends[0], 2U);
}

}  // namespace
}  // namespace strata::engine
