#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "strata/offload/state_store.h"

namespace strata::offload {
namespace {

TEST(Part, OverlapsWhatSharesAByte) {
  const Part part{1, 4096_B, 8192_B};
  EXPECT_TRUE(part.overlaps(part));
  EXPECT_TRUE(part.overlaps({1, 0_B, 4097_B}));
  EXPECT_FALSE(part.overlaps({1, 0_B, 4096_B}));
  EXPECT_FALSE(part.overlaps({1, 8192_B, 9000_B}));
  EXPECT_FALSE(part.overlaps({2, 4096_B, 8192_B}));
  EXPECT_FALSE(part.overlaps({1, 6000_B, 6000_B}));
}

TEST(Part, ElementsAtOnceFillTheBudgetAndBeginAtPagesOfEveryBlock) {
  // A remainder of 16 bits and a flag, two moments.
  const std::vector<int> bits{16, 1, 32, 32};
  const auto bytes = [&](Numel numel) {
    Bytes all;
    for (const int of_one : bits) all += Bytes(numel.value * of_one / 8);
    return all;
  };
  const Numel one = elements_at_once(bits, 1_KiB);
  EXPECT_EQ(one, Numel(32768));  // a page of flags
  EXPECT_EQ(elements_at_once(bits, bytes(one) * 2 - 1_B), one);
  EXPECT_EQ(elements_at_once(bits, bytes(one) * 2), one * 2);
  EXPECT_EQ(elements_at_once(bits, bytes(one) * 1000), one * 1000);
  EXPECT_EQ(elements_at_once(std::vector<int>{32, 32, 32}, 12_KiB), Numel(1024));
  EXPECT_GT(elements_at_once(bits, Bytes(std::numeric_limits<std::int64_t>::max())),
            Numel(1) * (1LL << 50));
}

}  // namespace
}  // namespace strata::offload
