#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>

#include "kernels/adam_tensor.h"
#include "kernels/references.h"
#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

constexpr UpdateScalars kLion{.lr = 0.125,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .weight_decay = 0.5,
                              .formula = Formula::kLion,
                              .gradient_scale = 0.5F};

UpdateSpans lion_spans(Tensor& tensor) {
  UpdateSpans spans = tensor.spans_with_copy(DType::kBFloat16);
  spans.exp_avg_sq = {};
  return spans;
}

TEST(Lion, GoesOneLengthAlongTheSignOfAMean) {
  Tensor tensor(4);
  tensor.weight = {1.0F, 1.0F, 1.0F, 1.0F};
  tensor.exp_avg = {1.0F, 1.0F, 0.0F, 0.0F};
  tensor.gradient = {2.0F, -20.0F, 0.0F, -0.0F};
  update_step(lion_spans(tensor), kLion, nullptr);
  const float decayed = 1.0F - 0.125F * 0.5F;
  EXPECT_EQ(tensor.weight,
            (std::vector<float>{decayed - 0.125F, decayed + 0.125F, decayed, decayed}));
  EXPECT_FLOAT_EQ(tensor.exp_avg[0], 1.0F);
  EXPECT_FLOAT_EQ(tensor.exp_avg[1], 0.99F - 0.1F);
}

TEST(Lion, EqualsTheReferenceBitForBitOnEveryTarget) {
  for_every_target([] {
    ThreadPool pool(3);
    for (const std::size_t numel : kSizes) {
      Tensor found(numel, numel % 3);
      Tensor expected(numel, numel % 3);
      update_step(lion_spans(found), kLion, &pool);
      update_reference(lion_spans(expected), kLion);
      expect_same(found, expected);
    }
  });
}

TEST(Lion, HasTheSameBitsOverEveryFormOfMasters) {
  for_every_target([] {
    constexpr std::size_t kNumel = 1003;
    Tensor whole(kNumel);
    Tensor split = whole;
    for (std::size_t i = 0; i < kNumel; ++i)
      split.weight16[i] = bfloat16_from(split.weight[i]).bits;
    std::vector<std::byte> rest(remainder_bytes(Numel(kNumel)).size());
    const MasterRemainder remainder = remainder_over(rest, Numel(kNumel));
    for (std::size_t i = 0; i < kNumel; ++i)
      set_remainder(remainder, i, remainder_of(split.weight[i]));
    UpdateSpans spans = lion_spans(split);
    spans.weight = {};
    spans.remainder = remainder;
    update_step(lion_spans(whole), kLion, nullptr);
    update_step(spans, kLion, nullptr);
    EXPECT_EQ(split.weight16, whole.weight16);
    EXPECT_EQ(split.exp_avg, whole.exp_avg);
    std::vector<float> joined(kNumel);
    join_masters(joined, spans.weight16, remainder);
    EXPECT_EQ(joined, whole.weight);
  });
}

}  // namespace
}  // namespace strata::kernels
