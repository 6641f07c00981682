#include "strata/kernels/adam.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "kernels/adam_tensor.h"
#include "kernels/references.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/float16.h"
// Adam over bf16 weights, and bf16 moments, that are rounded at each step.
#include <gtest/gtest.h>

namespace strata::kernels {
namespace {

TEST(AdamStep, EqualsTheReferenceBitForBitOnEveryTarget) {
  for_every_target([] {
    for (const UpdateScalars& scalars : variants()) {
      for (const std::size_t numel : kSizes) {
        Tensor found(numel, numel % 3);
        Tensor expected(numel, numel % 3);
        update_step(found.spans(), scalars, nullptr);
        update_reference(expected.spans(), scalars);
        expect_same(found, expected);
      }
    }
  });
}

// The first steps divide by numbers far from 1, each by its own; the dividends may be anything.
TEST(AdamStep, EqualsTheReferenceAtEveryStepWhateverTheSecondMoment) {
  constexpr std::size_t kNumel = 1021;
  for_every_target([] {
    for (std::int64_t step = 1; step <= 60; ++step) {
      for (const double beta2 : {0.999, 0.95, 0.99999}) {
        Tensor found(kNumel);
        for (std::size_t i = 0; i < kNumel; ++i) {
          const int exponent = static_cast<int>(i % 250) - 126;
          found.exp_avg_sq[i] = std::ldexp(1.0F + static_cast<float>(i) / 1024.0F, exponent);
        }
        found.exp_avg_sq[3] = 0.0F;
        found.gradient[3] = 0.0F;
        found.exp_avg_sq[4] = std::numeric_limits<float>::infinity();
        found.exp_avg_sq[5] = std::numeric_limits<float>::denorm_min();
        Tensor expected = found;
        const UpdateScalars scalars{.beta2 = beta2, .eps = 0.0, .step = step};
        update_step(found.spans(), scalars, nullptr);
        update_reference(expected.spans(), scalars);
        expect_same(found, expected);
      }
    }
  });
}

TEST(AdamStep, The16BitCopyIsTheRoundedWeightAndChangesNothingElse) {
  for_every_target([] {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const std::size_t numel : kSizes) {
        Tensor with_copy(numel, 1);
        Tensor without(numel, 1);
        update_step(with_copy.spans_with_copy(dtype), variants()[1], nullptr);
        update_step(without.spans(), variants()[1], nullptr);
        for (std::size_t i = 1; i <= numel; ++i) {
          const float weight = without.weight[i];
          without.weight16[i] =
              dtype == DType::kBFloat16 ? bfloat16_from(weight).bits : float16_from(weight).bits;
        }
        expect_same(with_copy, without);
      }
    }
  });
}

TEST(AdamStep, DoesNotDependOnWhereShardsBeginOrOnThreads) {
  constexpr std::size_t kNumel = 100'003;
  const UpdateScalars scalars = variants()[1];
  Tensor whole(kNumel);
  update_step(whole.spans(), scalars, nullptr);
  for (const std::size_t shard : {1000U, 33'335U, 99'999U}) {
    Tensor parts(kNumel);
    for (std::size_t begin = 0; begin < kNumel; begin += shard) {
      const std::size_t numel = std::min(shard, kNumel - begin);
      UpdateSpans part = parts.spans();
      part.weight = part.weight.subspan(begin, numel);
      part.exp_avg = part.exp_avg.subspan(begin, numel);
      part.exp_avg_sq = part.exp_avg_sq.subspan(begin, numel);
      part.gradient = part.gradient.subspan(begin, numel);
      update_step(part, scalars, nullptr);
    }
    expect_same(parts, whole);
  }
  Tensor whole16(kNumel);
  update_step(whole16.spans_with_copy(DType::kFloat16), scalars, nullptr);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    Tensor shared(kNumel);
    update_step(shared.spans_with_copy(DType::kFloat16), scalars, &pool);
    expect_same(shared, whole16);
  }
}

// A tensor whose masters are bf16 weights and a remainder.
struct SplitTensor {
  Tensor tensor;
  std::vector<std::byte> memory;
  MasterRemainder remainder;

  explicit SplitTensor(const Tensor& whole) : tensor(whole) {
    const Numel numel(whole.weight.size());
    const std::byte* masters = std::as_bytes(std::span(whole.weight)).data();
    memory.resize(remainder_bytes(numel).size());
    remainder = remainder_over(memory, numel);
    store_remainder(remainder, Numel(), masters, DType::kFloat32, numel, nullptr);
    cast_reference(weights(), DType::kBFloat16, masters, DType::kFloat32, numel);
  }
  std::byte* weights() { return std::as_writable_bytes(std::span(tensor.weight16)).data(); }
  UpdateSpans spans() {
    UpdateSpans result = tensor.spans_with_copy(DType::kBFloat16);
    result.weight = {};
    result.remainder = remainder;
    return result;
  }
  // The fp32 masters, where the whole tensor has them.
  Tensor joined() {
    Tensor result = tensor;
    join_masters(result.weight, weights(), remainder);
    return result;
  }
};

// The masters are those of fp32. Some lie half-way between two weights, and round up or down.
TEST(AdamStep, WithARemainderGivesTheBitsOfFp32Masters) {
  for_every_target([] {
    for (const UpdateScalars& scalars : variants()) {
      for (const std::size_t numel : kSizes) {
        Tensor whole(numel);
        for (std::size_t i = 0; i < numel; i += 5) whole.gradient[i] = whole.exp_avg[i] = 0.0F;
        for (std::size_t i = 0; i < numel; i += 10)
          whole.weight[i] = i % 20 == 0 ? 1.01171875F : 1.00390625F;
        SplitTensor split(whole);
        ThreadPool pool(3);
        for (int step = 0; step < 3; ++step) {
          update_step(split.spans(), scalars, step == 1 ? &pool : nullptr);
          update_reference(whole.spans_with_copy(DType::kBFloat16), scalars);
        }
        expect_same(split.joined(), whole);
        update_reference(split.spans(), scalars);
        update_reference(whole.spans_with_copy(DType::kBFloat16), scalars);
        expect_same(split.joined(), whole);
      }
    }
  });
}

// Zeroes, which are below every remainder, among them.
TEST(AdamStep, GoesOnFromWeightsThatWereWritten) {
  for_every_target([] {
    for (const std::size_t numel : kSizes) {
      Tensor whole(numel);
      std::fill(whole.exp_avg.begin(), whole.exp_avg.end(), 0.0F);
      std::fill(whole.gradient.begin(), whole.gradient.end(), 0.0F);
      SplitTensor split(whole);
      const auto wanted = [](std::size_t i) {
        return i % 3 == 0 ? 300.0F : (i % 3 == 1 ? 0.0F : -0.0F);
      };
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        Tensor beside = whole;
        UpdateSpans spans = beside.spans_with_copy(dtype);
        update_step(spans, {}, nullptr);
        std::vector<float> kept = beside.weight;
        spans.follows_weight16 = true;
        for (std::size_t i = 0; i < numel; i += 2) {
          kept[i] = wanted(i);
          beside.weight16[i] =
              dtype == DType::kBFloat16 ? bfloat16_from(kept[i]).bits : float16_from(kept[i]).bits;
        }
        Tensor reference = beside;
        UpdateSpans of_reference = reference.spans_with_copy(dtype);
        of_reference.follows_weight16 = true;
        update_step(spans, {}, nullptr);
        update_reference(of_reference, {});
        expect_same(beside, reference);
        expect_same(beside.weight, kept, "weight");
      }
      for (std::size_t i = 0; i < numel; ++i)
        split.tensor.weight16[i] = bfloat16_from(wanted(i)).bits;
      SplitTensor reference = split;
      reference.remainder = remainder_over(reference.memory, Numel(numel));
      update_step(split.spans(), {}, nullptr);
      update_reference(reference.spans(), {});
      for (std::size_t i = 0; i < numel; ++i) {
        EXPECT_EQ(split.tensor.weight16[i], bfloat16_from(wanted(i)).bits) << i;
        EXPECT_EQ(reference.tensor.weight16[i], bfloat16_from(wanted(i)).bits) << i;
      }
    }
  });
}

TEST(AdamStep, KeepsEveryMasterThatNothingMoves) {
  for_every_target([] {
    for (const std::size_t numel : kSizes) {
      Tensor still(numel);
      still.weight = awkward_numbers(numel, 7);
      for (std::vector<float>* zeroes : {&still.exp_avg, &still.exp_avg_sq, &still.gradient})
        std::fill(zeroes->begin(), zeroes->end(), 0.0F);
      SplitTensor split(still);
      update_step(split.spans(), {}, nullptr);
      expect_same(split.joined().weight, still.weight, "weight");
    }
  });
}

// Numbers that torch 2.11 printed for AdamW(lr=0.1, betas=(0.9, 0.99), weight_decay=0.5).
TEST(AdamStep, GivesTheKnownResultsOfTwoSteps) {
  for (const bool reference : {false, true}) {
    std::array<float, 3> weight = {1.0F, -2.0F, 0.5F};
    std::array<float, 3> exp_avg{};
    std::array<float, 3> exp_avg_sq{};
    const std::array<float, 3> gradient = {0.3F, -0.07F, 0.0F};
    for (const std::int64_t step : {1, 2}) {
      const UpdateScalars scalars{.lr = 0.1, .beta2 = 0.99, .weight_decay = 0.5, .step = step};
      const UpdateSpans spans{weight, exp_avg, exp_avg_sq, gradient};
      reference ? update_reference(spans, scalars) : update_step(spans, scalars, nullptr);
    }
    EXPECT_THAT(weight, ::testing::ElementsAre(0x1.6a3d6ep-1F, -0x1.9c28f4p+0F, 0x1.ce147ap-2F));
    EXPECT_THAT(exp_avg, ::testing::ElementsAre(0x1.d2f1acp-5F, -0x1.b3d07ep-7F, 0.0F));
    EXPECT_THAT(exp_avg_sq, ::testing::ElementsAre(0x1.d57ffcp-10F, 0x1.98fc9p-14F, 0.0F));
  }
}

TEST(AdamStep, DecayActsOnTheWeightWhenDecoupledAndOnTheGradientOtherwise) {
  for (const bool decoupled : {true, false}) {
    std::array<float, 1> weight = {2.0F};
    std::array<float, 1> exp_avg{};
    std::array<float, 1> exp_avg_sq{};
    const std::array<float, 1> gradient = {0.0F};
    update_step({weight, exp_avg, exp_avg_sq, gradient},
                {.lr = 0.5, .weight_decay = 0.25, .decoupled = decoupled}, nullptr);
    EXPECT_FLOAT_EQ(weight[0], decoupled ? 1.75F : 1.5F);
    EXPECT_FLOAT_EQ(exp_avg[0], decoupled ? 0.0F : 0.05F);
  }
}

TEST(AdamStep, ABadGradientSpoilsItsOwnElementOnly) {
  for_every_target([] {
    Tensor found(100);
    Tensor clean(100);
    found.gradient[37] = std::numeric_limits<float>::quiet_NaN();
    found.gradient[99] = std::numeric_limits<float>::infinity();
    update_step(found.spans(), {}, nullptr);
    update_step(clean.spans(), {}, nullptr);
    for (std::size_t i = 0; i < 100; ++i) {
      EXPECT_EQ(std::isnan(found.weight[i]), i == 37 || i == 99);
      if (i != 37 && i != 99) {
        EXPECT_EQ(found.weight[i], clean.weight[i]);
      }
    }
  });
}

TEST(AdamStep, SubnormalMomentsAreKept) {
  for_every_target([] {
    Tensor found(33);
    Tensor expected(33);
    for (Tensor* tensor : {&found, &expected}) {
      for (float& value : tensor->exp_avg) value = 1e-40F;
      for (float& value : tensor->exp_avg_sq) value = 1e-42F;
      for (float& value : tensor->gradient) value = 1e-39F;
    }
    update_step(found.spans(), {.step = 5}, nullptr);
    update_reference(expected.spans(), {.step = 5});
    expect_same(found, expected);
    EXPECT_GT(found.exp_avg_sq[0], 0.0F);
  });
}

TEST(AdamStep, RefusesARemainderOfWeightsThatAreNotBf16) {
  SplitTensor split{Tensor(8)};
  UpdateSpans spans = split.spans();
  spans.weight16_dtype = DType::kFloat16;
  EXPECT_THROW(update_step(spans, {}, nullptr), UsageError);
}

TEST(AdamStep, RefusesACopyThatIsNot16Bit) {
  Tensor tensor(4);
  try {
    update_step(tensor.spans_with_copy(DType::kFloat64), {}, nullptr);
    FAIL() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("bfloat16 or float16"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("float64"));
  }
}

TEST(AdamStep, SpansOfDifferentLengthsAndAZerothStepAreBugs) {
  Tensor tensor(4);
  UpdateSpans spans = tensor.spans();
  EXPECT_THROW(update_step(spans, {.step = 0}, nullptr), InternalError);
  spans.gradient = spans.gradient.first(3);
  EXPECT_THROW(update_step(spans, {}, nullptr), InternalError);
}

// A tensor whose bf16 weights, and moments where asked, are all that there is.
struct RoundedTensor {
  Tensor tensor;
  std::vector<std::uint16_t> exp_avg16, exp_avg_sq16;
  bool narrow_moments;

  RoundedTensor(const Tensor& whole, bool narrow)
      : tensor(whole),
        exp_avg16(whole.weight.size()),
        exp_avg_sq16(whole.weight.size()),
        narrow_moments(narrow) {
    const auto round = [](const std::vector<float>& from, std::vector<std::uint16_t>& to) {
      for (std::size_t i = 0; i < to.size(); ++i) to[i] = bfloat16_from(from[i]).bits;
    };
    round(tensor.weight, tensor.weight16);
    round(tensor.exp_avg, exp_avg16);
    round(tensor.exp_avg_sq, exp_avg_sq16);
  }
  UpdateSpans spans() {
    UpdateSpans result = tensor.spans_with_copy(DType::kBFloat16);
    result.weight = {};
    result.rounds_weight16 = true;
    if (narrow_moments) {
      result.exp_avg = result.exp_avg_sq = {};
      const auto bytes = [this](std::vector<std::uint16_t>& values) {
        return std::as_writable_bytes(std::span(values)).data() + 2 * tensor.offset;
      };
      result.moments16 = {bytes(exp_avg16), bytes(exp_avg_sq16)};
    }
    return result;
  }
};

// fp32 masters and moments, rounded after each step, are the measure.
TEST(AdamStep, OverRoundedWeightsGivesTheBitsOfFp32MastersThatAreRounded) {
  const auto round = [](std::vector<float>& values) {
    for (float& value : values) value = to_float(bfloat16_from(value));
  };
  for_every_target([&] {
    for (const UpdateScalars& scalars : variants()) {
      for (const std::size_t numel : kSizes) {
        for (const bool narrow : {false, true}) {
          Tensor whole(numel, numel % 3);
          RoundedTensor rounded(whole, narrow);
          RoundedTensor expected = rounded;
          ThreadPool pool(3);
          for (int step = 0; step < 3; ++step) {
            round(whole.weight);
            if (narrow) {
              round(whole.exp_avg);
              round(whole.exp_avg_sq);
            }
            update_reference(whole.spans_with_copy(DType::kBFloat16), scalars);
            update_step(rounded.spans(), scalars, step == 1 ? &pool : nullptr);
            update_reference(expected.spans(), scalars);
          }
          EXPECT_EQ(rounded.tensor.weight16, expected.tensor.weight16);
          EXPECT_EQ(rounded.exp_avg16, expected.exp_avg16);
          EXPECT_EQ(rounded.exp_avg_sq16, expected.exp_avg_sq16);
          const std::size_t first = whole.offset;
          for (std::size_t i = first; i < whole.weight.size(); ++i) {
            ASSERT_EQ(rounded.tensor.weight16[i], whole.weight16[i]) << i;
            if (narrow) {
              ASSERT_EQ(rounded.exp_avg16[i], bfloat16_from(whole.exp_avg[i]).bits) << i;
              ASSERT_EQ(rounded.exp_avg_sq16[i], bfloat16_from(whole.exp_avg_sq[i]).bits) << i;
            } else {
              ASSERT_TRUE(same_bits(rounded.tensor.exp_avg[i], whole.exp_avg[i])) << i;
              ASSERT_TRUE(same_bits(rounded.tensor.exp_avg_sq[i], whole.exp_avg_sq[i])) << i;
            }
          }
        }
      }
    }
  });
}

TEST(AdamStep, RefusesToRoundWeightsThatAreNotBf16) {
  RoundedTensor rounded(Tensor(8), true);
  UpdateSpans spans = rounded.spans();
  spans.weight16_dtype = DType::kFloat16;
  EXPECT_THROW(update_step(spans, {}, nullptr), UsageError);
  spans = rounded.spans();
  spans.rounds_weight16 = false;
  EXPECT_THROW(update_step(spans, {}, nullptr), InternalError) << "bf16 moments of fp32 masters";
}

std::byte* bytes_of(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values)).data();
}

// An array of `dtype` with the values of an fp32 one.
std::vector<std::byte> narrowed(std::vector<float>& values, DType dtype) {
  const Numel numel(std::ssize(values));
  std::vector<std::byte> result(strata::bytes_of(numel, dtype).size());
  cast(result.data(), dtype, bytes_of(values), DType::kFloat32, numel, nullptr);
  return result;
}

std::vector<float> widened(const std::vector<std::byte>& values, DType dtype) {
  std::vector<float> result(values.size() / size_of(dtype).size());
  cast(bytes_of(result), DType::kFloat32, values.data(), dtype, Numel(std::ssize(result)), nullptr);
  return result;
}

AdamTensor tensor_of(Tensor& t, std::int64_t step) {
  return {.weight = bytes_of(t.weight),
          .exp_avg = bytes_of(t.exp_avg),
          .exp_avg_sq = bytes_of(t.exp_avg_sq),
          .gradient = bytes_of(t.gradient),
          .numel = Numel(std::ssize(t.weight)),
          .step = step};
}

TEST(TensorAdam, UpdatesManyTensorsAsOneByOneWhateverTheThreads) {
  const std::vector<std::size_t> sizes{0, 1, 40'000, 17, 32'768, 70'001, 0};
  for (const int threads : {0, 1, 3}) {
    std::vector<Tensor> found(sizes.begin(), sizes.end());
    std::vector<Tensor> expected(sizes.begin(), sizes.end());
    std::vector<AdamTensor> tensors;
    UpdateScalars scalars{.weight_decay = 0.1};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      scalars.step = static_cast<std::int64_t>(i + 1);
      tensors.push_back(tensor_of(found[i], scalars.step));
      update_step(expected[i].spans(), scalars, nullptr);
    }
    std::optional<ThreadPool> pool;
    if (threads > 0) pool.emplace(threads);
    adam_step(tensors, scalars, pool ? &*pool : nullptr);
    for (std::size_t i = 0; i < sizes.size(); ++i) expect_same(found[i], expected[i]);
  }
}

TEST(TensorAdam, ComputesInFp32AndRoundsOnce) {
  for (const DType weight : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const DType moment : {weight, DType::kFloat32}) {
      Tensor plain(10'003);
      auto weights = narrowed(plain.weight, weight);
      auto gradients = narrowed(plain.gradient, weight);
      auto first = narrowed(plain.exp_avg, moment);
      auto second = narrowed(plain.exp_avg_sq, moment);
      plain.weight = widened(weights, weight);
      plain.gradient = widened(gradients, weight);
      plain.exp_avg = widened(first, moment);
      plain.exp_avg_sq = widened(second, moment);
      const AdamTensor tensor{.weight = weights.data(),
                              .weight_dtype = weight,
                              .exp_avg = first.data(),
                              .exp_avg_sq = second.data(),
                              .moment_dtype = moment,
                              .gradient = gradients.data(),
                              .gradient_dtype = weight,
                              .numel = Numel(10'003),
                              .step = 4};
      UpdateScalars scalars{.weight_decay = 0.1, .decoupled = false, .step = 4};
      adam_step(std::span(&tensor, 1), scalars, nullptr);
      update_reference(plain.spans(), scalars);
      EXPECT_EQ(weights, narrowed(plain.weight, weight)) << name_of(weight);
      EXPECT_EQ(first, narrowed(plain.exp_avg, moment)) << name_of(moment);
      EXPECT_EQ(second, narrowed(plain.exp_avg_sq, moment)) << name_of(moment);
    }
  }
}

TEST(TensorAdam, WithoutBiasCorrectionEveryStepIsTheLast) {
  Tensor found(100);
  Tensor expected(100);
  update_step(found.spans(), {.bias_correction = false, .step = 1}, nullptr);
  update_step(expected.spans(), {.step = 1'000'000'000}, nullptr);
  expect_same(found, expected);
}

TEST(TensorAdam, RefusesOtherTypesBeforeItWrites) {
  Tensor fine(3);
  Tensor other(3);
  Tensor untouched(3);
  std::vector<AdamTensor> tensors{tensor_of(fine, 1), tensor_of(other, 1)};
  tensors[1].gradient_dtype = DType::kFloat64;
  try {
    adam_step(tensors, {}, nullptr);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("found a gradient of float64"));
  }
  expect_same(fine, untouched);
}

}  // namespace
}  // namespace strata::kernels
