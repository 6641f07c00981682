#include "strata/kernels/master_remainder.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/every_target.h"
#include "kernels/references.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise.h"

namespace strata::kernels {
namespace {

// A whole shard's remainder, filled with bytes that no result may keep.
struct Stored {
  explicit Stored(std::size_t numel)
      : memory(remainder_bytes(Numel(numel)).size(), std::byte{0xA5}),
        remainder(remainder_over(memory, Numel(numel))) {}
  std::vector<std::byte> memory;
  MasterRemainder remainder;
};

std::vector<std::byte> as_type(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> result(bytes_of(Numel(values.size()), dtype).size());
  cast_reference(result.data(), dtype, std::as_bytes(std::span(values)).data(), DType::kFloat32,
                 Numel(values.size()));
  return result;
}

TEST(MasterRemainder, WithTheRoundedValueIsTheValueForEveryUpperHalf) {
  constexpr std::uint32_t kLows[] = {0,      1,      0x7FFE, 0x7FFF, 0x8000,
                                     0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234};
  for (std::uint32_t high = 0; high <= 0xFFFFU; ++high) {
    for (const std::uint32_t low : kLows) {
      const auto master = std::bit_cast<float>((high << 16) | low);
      const float joined = joined_master(bfloat16_from(master), remainder_of(master));
      ASSERT_TRUE(same_bits(joined, master)) << std::hex << high << ":" << low;
    }
  }
}

// The remainder may be that of any weight before. Zeroes are the hard case: no number is below
// them.
TEST(MasterRemainder, OfTheWeightBeforeLeavesAMasterThatRoundsToTheOneWritten) {
  for (std::uint32_t high = 0; high <= 0xFFFFU; ++high) {
    const BFloat16 weight{static_cast<std::uint16_t>(high)};
    if ((high & 0x7FFFU) >= 0x7F80U) continue;  // no number
    // An exact half, which is of even weights alone.
    const RemainderBits half = high % 2 == 0 ? RemainderBits{0x8000, true} : RemainderBits{0x9000};
    for (const RemainderBits before :
         {half, RemainderBits{0x8001}, RemainderBits{0xFFFF}, RemainderBits{0x7FFF}}) {
      const float master = joined_master(weight, before);
      if ((high & 0x7FFFU) == 0) {
        EXPECT_LT(std::abs(master), 1e-40F);
        EXPECT_EQ(std::signbit(master), high != 0);
      } else {
        ASSERT_EQ(bfloat16_from(master).bits, weight.bits) << std::hex << high << ":" << before.low;
      }
    }
  }
}

TEST(MasterRemainder, OfEveryTypeIsWhatRoundingLoses) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t numel : kSizes) {
      const auto source = as_type(awkward_numbers(numel, 3), dtype);
      std::vector<float> expected(numel);
      cast_reference(std::as_writable_bytes(std::span(expected)).data(), DType::kFloat32,
                     source.data(), dtype, Numel(numel));
      std::vector<std::byte> weights(2 * numel);
      cast_reference(weights.data(), DType::kBFloat16, source.data(), dtype, Numel(numel));
      Stored stored(numel);
      store_remainder(stored.remainder, Numel(), source.data(), dtype, Numel(numel), nullptr);
      std::vector<float> masters(numel);
      join_masters(masters, weights.data(), stored.remainder);
      for (std::size_t i = 0; i < numel; ++i)
        ASSERT_TRUE(same_bits(masters[i], expected[i])) << name_of(dtype) << " " << i;
    }
  }
}

// Pieces of any length leave their neighbours alone, also with several threads.
TEST(MasterRemainder, IsStoredPieceByPiece) {
  constexpr std::size_t kNumel = 200'001;
  constexpr std::size_t kLast = 2 * kNumel + kNumel / 8;  // of this byte one bit is ours
  std::vector<float> values = awkward_numbers(kNumel, 5);
  for (std::size_t i = 0; i < kNumel; i += 3) values[i] = 1.01171875F;  // 1 + 3 / 2^8: a half, up
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto source = as_type(values, dtype);
    Stored whole(kNumel);
    store_remainder(whole.remainder, Numel(), source.data(), dtype, Numel(kNumel), nullptr);
    whole.memory[kLast] &= std::byte{1};
    for (const std::size_t piece : {1U, 5U, 1003U, 150'001U}) {
      ThreadPool pool(3);
      Stored parts(kNumel);
      parts.memory[kLast] = std::byte{0};
      for (std::size_t begin = 0; begin < kNumel; begin += piece) {
        const Numel numel(std::min(piece, kNumel - begin));
        store_remainder(parts.remainder, Numel(begin),
                        source.data() + bytes_of(Numel(begin), dtype).size(), dtype, numel, &pool);
      }
      ASSERT_EQ(parts.memory, whole.memory) << name_of(dtype) << " " << piece;
    }
  }
}

TEST(MasterRemainder, RefusesWhatIsNoFloatingType) {
  Stored stored(8);
  const std::vector<std::byte> source(64);
  EXPECT_THROW(
      store_remainder(stored.remainder, Numel(), source.data(), DType::kInt64, Numel(8), nullptr),
      UsageError);
}

}  // namespace
}  // namespace strata::kernels
