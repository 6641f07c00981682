#include "strata/base/units.h"

#include <gtest/gtest.h>

namespace strata {
namespace {

TEST(Units, AlignUpKeepsMultiplesAndRaisesTheRest) {
  EXPECT_EQ(align_up(0_B, 256_B), 0_B);
  EXPECT_EQ(align_up(256_B, 256_B), 256_B);
  EXPECT_EQ(align_up(257_B, 256_B), 512_B);
  EXPECT_EQ(align_up(Numel(10), Numel(3)), Numel(12));
}

TEST(Units, SizesBeyondFourGigabytesDoNotOverflow) {
  EXPECT_EQ((3_GiB * 100).value, 322122547200);
  EXPECT_EQ(3_GiB * 100 / 3_GiB, 100);
}

TEST(Units, BytesPrintWithThreeSignificantDigits) {
  EXPECT_EQ(to_string(0_B), "0 B");
  EXPECT_EQ(to_string(512_B), "512 B");
  EXPECT_EQ(to_string(Bytes(1536 * 1024)), "1.50 MiB");
  EXPECT_EQ(to_string(Bytes(std::int64_t{22763552768})), "21.2 GiB");
}

}  // namespace
}  // namespace strata
