#include "strata/kernels/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace strata::kernels {
namespace {

// The neighbours of `value` among the 16-bit numbers decide on the right rounding: neither may be
// nearer, and where two are equally near, the result must be the even one.
template <typename Small, typename From>
void expect_nearest_even(float value, From from) {
  const Small rounded = from(value);
  const double error = std::fabs(static_cast<double>(to_float(rounded)) - value);
  for (const int step : {-1, 1}) {
    const Small neighbour{static_cast<std::uint16_t>(rounded.bits + step)};
    const double other = std::fabs(static_cast<double>(to_float(neighbour)) - value);
    if (!std::isfinite(other)) continue;
    ASSERT_LE(error, other) << value;
    if (error == other) {
      ASSERT_EQ(rounded.bits % 2, 0) << value;
    }
  }
}

TEST(Float16, EveryBitPatternSurvivesTheWayThroughFp32) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const BFloat16 brain{static_cast<std::uint16_t>(bits)};
    const bool half_nan = std::isnan(to_float(half));
    const bool brain_nan = std::isnan(to_float(brain));
    EXPECT_EQ(float16_from(to_float(half)).bits, half_nan ? bits | 0x0200U : bits);
    EXPECT_EQ(bfloat16_from(to_float(brain)).bits, brain_nan ? bits | 0x0040U : bits);
  }
}

TEST(Float16, HasTheValuesOfTheFormat) {
  EXPECT_EQ(to_float(Float16{0x3C00}), 1.0F);
  EXPECT_EQ(to_float(Float16{0xC000}), -2.0F);
  EXPECT_EQ(to_float(Float16{0x7BFF}), 65504.0F);
  EXPECT_EQ(to_float(Float16{0x0400}), 0x1p-14F);
  EXPECT_EQ(to_float(Float16{0x0001}), 0x1p-24F);
  EXPECT_EQ(to_float(Float16{0xFC00}), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(to_float(BFloat16{0x3F80}), 1.0F);
  EXPECT_EQ(to_float(BFloat16{0x0001}), 0x1p-133F);
}

TEST(Float16, RoundsToNearestEvenEverywhere) {
  for (std::uint32_t bits = 0; bits < 0x47800000U; bits += 1021) {  // up to 65536
    const auto value = std::bit_cast<float>(bits);
    if (value < 65504.0F) expect_nearest_even<Float16>(value, float16_from);
    expect_nearest_even<BFloat16>(value, bfloat16_from);
  }
}

TEST(Float16, TiesGoToTheEvenNeighbour) {
  EXPECT_EQ(float16_from(1.0F + 0x1p-11F).bits, 0x3C00);
  EXPECT_EQ(float16_from(1.0F + 3 * 0x1p-11F).bits, 0x3C02);
  EXPECT_EQ(float16_from(0x1p-25F).bits, 0x0000);
  EXPECT_EQ(float16_from(3 * 0x1p-25F).bits, 0x0002);
  EXPECT_EQ(bfloat16_from(1.0F + 0x1p-8F).bits, 0x3F80);
  EXPECT_EQ(bfloat16_from(1.0F + 3 * 0x1p-8F).bits, 0x3F82);
}

TEST(Float16, TooLargeNumbersBecomeInfinityAndNansStayNans) {
  EXPECT_EQ(float16_from(65519.99F).bits, 0x7BFF);
  EXPECT_EQ(float16_from(65520.0F).bits, 0x7C00);
  EXPECT_EQ(float16_from(-1e30F).bits, 0xFC00);
  EXPECT_EQ(bfloat16_from(std::numeric_limits<float>::max()).bits, 0x7F80);
  const auto low_payload = std::bit_cast<float>(0x7F800001U);  // rounding it would give infinity
  EXPECT_TRUE(std::isnan(to_float(float16_from(low_payload))));
  EXPECT_TRUE(std::isnan(to_float(bfloat16_from(low_payload))));
}

}  // namespace
}  // namespace strata::kernels
