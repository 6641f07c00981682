#include "strata/kernels/elementwise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/every_target.h"
#include "kernels/references.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {
namespace {

constexpr DType kSummable[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr DType kCastable[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// Bytes of one dtype. `start` free elements before the first one make it lie unaligned.
struct Array {
  DType dtype;
  std::size_t numel;
  std::size_t start;
  std::vector<std::byte> memory;

  Array(DType type, std::size_t count, std::size_t free_elements)
      : dtype(type),
        numel(count),
        start(free_elements),
        memory(bytes_of(Numel(count + free_elements), type).size()) {}

  std::byte* data() { return memory.data() + bytes_of(Numel(start), dtype).value; }

  double at(std::size_t i) {
    const std::byte* const place = data() + bytes_of(Numel(i), dtype).value;
    switch (dtype) {
      case DType::kFloat64:
        return read<double>(place);
      case DType::kFloat32:
        return static_cast<double>(read<float>(place));
      case DType::kBFloat16:
        return static_cast<double>(to_float(read<BFloat16>(place)));
      default:
        return static_cast<double>(to_float(read<Float16>(place)));
    }
  }

  template <typename T>
  static T read(const std::byte* place) {
    T value;
    std::memcpy(&value, place, sizeof value);
    return value;
  }
};

Array awkward_array(DType dtype, std::size_t numel, std::size_t start, std::uint32_t seed) {
  const auto numbers = awkward_numbers(numel, seed);
  Array array(dtype, numel, start);
  if (dtype == DType::kFloat64) {  // with bits that fp32 does not have
    for (std::size_t i = 0; i < numel; ++i) {
      const double value = static_cast<double>(numbers[i]) * (1.0 + 0x1p-30);
      std::memcpy(array.data() + 8 * i, &value, sizeof value);
    }
  } else if (numel > 0) {
    cast_reference(array.data(), dtype, std::as_bytes(std::span(numbers)).data(), DType::kFloat32,
                   Numel(numel));
  }
  return array;
}

void expect_same(Array& found, Array& expected) {
  ASSERT_EQ(found.numel, expected.numel);
  for (std::size_t i = 0; i < found.numel; ++i) {
    const double a = found.at(i);
    const double b = expected.at(i);
    ASSERT_TRUE(std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
                (std::isnan(a) && std::isnan(b)))
        << "[" << i << "] of " << found.numel << ": " << a << " is not " << b;
  }
}

TEST(Cast, EqualsTheReferenceForEveryPairOnEveryTarget) {
  for_every_target([] {
    for (const DType from : kCastable) {
      for (const DType to : kCastable) {
        SCOPED_TRACE(fmt::format("{} to {}", name_of(from), name_of(to)));
        for (const std::size_t numel : kSizes) {
          Array source = awkward_array(from, numel, numel % 3, 1);
          Array found(to, numel, 1);
          Array expected(to, numel, 1);
          cast(found.data(), to, source.data(), from, Numel(numel), nullptr);
          cast_reference(expected.data(), to, source.data(), from, Numel(numel));
          expect_same(found, expected);
        }
      }
    }
  });
}

TEST(Cast, ToAWiderTypeAndBackIsTheIdentityOnAllBitPatterns) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  const std::byte* const source = std::as_bytes(std::span(patterns)).data();
  for_every_target([&] {
    for (const DType narrow : {DType::kBFloat16, DType::kFloat16}) {
      for (const DType wide : {DType::kFloat32, DType::kFloat64}) {
        Array original(narrow, 65536, 0);
        original.memory.assign(source, source + 2 * patterns.size());
        Array between(wide, 65536, 0);
        Array back(narrow, 65536, 0);
        cast(between.data(), wide, original.data(), narrow, Numel(65536), nullptr);
        cast(back.data(), narrow, between.data(), wide, Numel(65536), nullptr);
        expect_same(back, original);
      }
    }
  });
}

TEST(Cast, WritesNothingOutsideItsRange) {
  for (const DType to : kCastable) {
    for (const std::size_t numel : {1U, 15U, 17U, 31U}) {
      Array source = awkward_array(DType::kFloat32, numel, 0, 1);
      Array found(to, numel + 64, 0);
      std::fill(found.memory.begin(), found.memory.end(), std::byte{0x5A});
      const std::size_t width = size_of(to).size();
      cast(found.data() + 32 * width, to, source.data(), DType::kFloat32, Numel(numel), nullptr);
      for (std::size_t i = 0; i < found.memory.size(); ++i) {
        if (i < 32 * width || i >= (32 + numel) * width) {
          ASSERT_EQ(found.memory[i], std::byte{0x5A}) << i;
        }
      }
    }
  }
}

TEST(Accumulate, EqualsTheReferenceForEveryPairOnEveryTarget) {
  for_every_target([] {
    for (const DType from : kSummable) {
      for (const DType to : kSummable) {
        SCOPED_TRACE(fmt::format("{} += {}", name_of(to), name_of(from)));
        for (const std::size_t numel : kSizes) {
          Array source = awkward_array(from, numel, numel % 2, 1);
          Array found = awkward_array(to, numel, 1, 2);
          Array expected = found;
          accumulate(found.data(), to, source.data(), from, Numel(numel), nullptr);
          accumulate_reference(expected.data(), to, source.data(), from, Numel(numel));
          expect_same(found, expected);
        }
      }
    }
  });
}

TEST(Accumulate, RoundsOnceFromTheExactFp32Sum) {
  const float one_and_half_ulp = 1.0F + 0x1p-8F;  // rounded to bf16 before the sum it would be 1
  for_every_target([&] {
    std::vector<std::uint16_t> target(20, bfloat16_from(0x1p-7F).bits);
    const std::vector<float> source(20, one_and_half_ulp);
    accumulate(std::as_writable_bytes(std::span(target)).data(), DType::kBFloat16,
               std::as_bytes(std::span(source)).data(), DType::kFloat32, Numel(20), nullptr);
    for (const std::uint16_t bits : target) {
      EXPECT_EQ(to_float(BFloat16{bits}), 1.0F + 0x1p-6F);  // a tie, to even
    }
  });
}

TEST(SumInOrder, EqualsTheReferenceForEveryTypeAndWorldOnEveryTarget) {
  for_every_target([] {
    for (const DType dtype : kSummable) {
      for (const std::size_t world : {1U, 2U, 3U, 8U, 9U, 17U}) {
        for (const std::size_t numel : kSizes) {
          if (numel > 3000 && world > 9) continue;
          SCOPED_TRACE(fmt::format("{} ranks, {} of {}", world, numel, name_of(dtype)));
          std::vector<Array> arrays;
          std::vector<const std::byte*> sources;
          for (std::size_t rank = 0; rank < world; ++rank) {
            arrays.push_back(
                awkward_array(dtype, numel, rank % 2, static_cast<std::uint32_t>(rank)));
          }
          for (Array& array : arrays) sources.push_back(array.data());
          for (const bool add : {false, true}) {
            std::vector<float> found(numel, 0.1F);
            std::vector<float> expected(numel, 0.1F);
            sum_in_order(found, sources, dtype, 1.0F / 3.0F, add, nullptr);
            sum_in_order_reference(expected, sources, dtype, 1.0F / 3.0F, add);
            for (std::size_t i = 0; i < numel; ++i) {
              ASSERT_TRUE(same_bits(found[i], expected[i])) << i;
            }
          }
        }
      }
    }
  });
}

TEST(SumInOrder, KeepsTheOrderOfTheSources) {
  // (1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1.
  const std::vector<float> large(40, 1e8F);
  const std::vector<float> minus(40, -1e8F);
  const std::vector<float> one(40, 1.0F);
  const auto bytes = [](const std::vector<float>& v) { return std::as_bytes(std::span(v)).data(); };
  for_every_target([&] {
    std::vector<float> sum(40);
    sum_in_order(sum, std::vector{bytes(large), bytes(one), bytes(minus)}, DType::kFloat32, 1.0F,
                 false, nullptr);
    EXPECT_THAT(sum, ::testing::Each(0.0F));
    sum_in_order(sum, std::vector{bytes(large), bytes(minus), bytes(one)}, DType::kFloat32, 2.0F,
                 false, nullptr);
    EXPECT_THAT(sum, ::testing::Each(2.0F));
  });
}

TEST(SumInOrder, OneNegativeZeroStaysOne) {
  const std::vector<float> zeros(20, -0.0F);
  std::vector<float> sum(20, 1.0F);
  sum_in_order(sum, std::vector{std::as_bytes(std::span(zeros)).data()}, DType::kFloat32, 1.0F,
               false, nullptr);
  for (const float value : sum) EXPECT_TRUE(std::signbit(value));
}

// A script has written every third weight; the others are the rounded masters.
TEST(AdoptWritten, GivesTheBitsOfTheReferenceOnEveryTarget) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t numel : kSizes) {
      const std::vector<float> masters = awkward_numbers(numel, 3);
      std::vector<float> values = masters;
      for (std::size_t i = 0; i < numel; i += 3) values[i] = static_cast<float>(i) * 0.37F + 0.1F;
      std::vector<std::byte> weights(bytes_of(Numel(numel), dtype).size());
      cast_reference(weights.data(), dtype, std::as_bytes(std::span(values)).data(),
                     DType::kFloat32, Numel(numel));
      std::vector<float> written(numel);
      cast_reference(std::as_writable_bytes(std::span(written)).data(), DType::kFloat32,
                     weights.data(), dtype, Numel(numel));
      std::vector<std::byte> narrow(weights.size());
      cast_reference(narrow.data(), dtype, std::as_bytes(std::span(masters)).data(),
                     DType::kFloat32, Numel(numel));
      std::vector<float> rounded(numel);
      cast_reference(std::as_writable_bytes(std::span(rounded)).data(), DType::kFloat32,
                     narrow.data(), dtype, Numel(numel));
      std::vector<float> expected = masters;
      adopt_written_reference(expected, weights.data(), dtype);
      for (std::size_t i = 0; i < numel; ++i) {
        const bool keeps = rounded[i] == written[i];
        ASSERT_TRUE(keeps || i % 3 == 0 || std::isnan(masters[i])) << i;
        ASSERT_TRUE(same_bits(expected[i], keeps ? masters[i] : written[i])) << i;
      }
      for_every_target([&] {
        std::vector<float> got = masters;
        adopt_written(got, weights.data(), dtype, nullptr);
        for (std::size_t i = 0; i < numel; ++i) ASSERT_TRUE(same_bits(got[i], expected[i])) << i;
      });
    }
  }
}

TEST(Elementwise, ThreadsDoNotChangeTheResult) {
  constexpr std::size_t kNumel = 600'001;  // fewer are not shared
  ThreadPool pool(3);
  Array a = awkward_array(DType::kFloat32, kNumel, 0, 1);
  Array b = awkward_array(DType::kBFloat16, kNumel, 1, 2);
  Array alone(DType::kFloat16, kNumel, 0);
  Array shared(DType::kFloat16, kNumel, 0);
  cast(alone.data(), DType::kFloat16, a.data(), DType::kFloat32, Numel(kNumel), nullptr);
  cast(shared.data(), DType::kFloat16, a.data(), DType::kFloat32, Numel(kNumel), &pool);
  expect_same(shared, alone);
  accumulate(alone.data(), DType::kFloat16, b.data(), DType::kBFloat16, Numel(kNumel), nullptr);
  accumulate(shared.data(), DType::kFloat16, b.data(), DType::kBFloat16, Numel(kNumel), &pool);
  expect_same(shared, alone);
  const std::vector<const std::byte*> sources = {b.data(), b.data(), b.data()};
  std::vector<float> sum(kNumel);
  std::vector<float> shared_sum(kNumel);
  sum_in_order(sum, sources, DType::kBFloat16, 0.25F, false, nullptr);
  sum_in_order(shared_sum, sources, DType::kBFloat16, 0.25F, false, &pool);
  for (std::size_t i = 0; i < kNumel; ++i) ASSERT_TRUE(same_bits(sum[i], shared_sum[i]));
}

TEST(Elementwise, TypesThatAnOperationDoesNotHaveAreRefusedByName) {
  std::vector<std::byte> memory(64);
  const auto message_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message_of([&] {
                cast(memory.data(), DType::kInt64, memory.data() + 32, DType::kFloat32, Numel(4),
                     nullptr);
              }),
              ::testing::AllOf(::testing::HasSubstr("A cast"), ::testing::HasSubstr("int64")));
  EXPECT_THAT(message_of([&] {
                accumulate(memory.data(), DType::kFloat64, memory.data() + 32, DType::kFloat32,
                           Numel(4), nullptr);
              }),
              ::testing::HasSubstr("found: float64"));
  std::vector<float> sum(2);
  EXPECT_THAT(message_of([&] {
                sum_in_order(sum, std::vector<const std::byte*>{memory.data()}, DType::kFloat64,
                             1.0F, false, nullptr);
              }),
              ::testing::HasSubstr("A sum over ranks"));
  EXPECT_THROW(sum_in_order(sum, {}, DType::kFloat32, 1.0F, false, nullptr), InternalError);
}

}  // namespace
}  // namespace strata::kernels
