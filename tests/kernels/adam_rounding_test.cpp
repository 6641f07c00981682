// Adam over bf16 weights, and bf16 moments, that are rounded at each step.
#include <gtest/gtest.h>

#include "kernels/adam_tensor.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {
namespace {

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
  AdamSpans spans() {
    AdamSpans result = tensor.spans_with_copy(DType::kBFloat16);
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
    for (const AdamScalars& scalars : variants()) {
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
            adam_step_reference(whole.spans_with_copy(DType::kBFloat16), scalars);
            adam_step(rounded.spans(), scalars, step == 1 ? &pool : nullptr);
            adam_step_reference(expected.spans(), scalars);
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
  AdamSpans spans = rounded.spans();
  spans.weight16_dtype = DType::kFloat16;
  EXPECT_THROW(adam_step(spans, {}, nullptr), UsageError);
  spans = rounded.spans();
  spans.rounds_weight16 = false;
  EXPECT_THROW(adam_step(spans, {}, nullptr), InternalError) << "bf16 moments of fp32 masters";
}

}  // namespace
}  // namespace strata::kernels
