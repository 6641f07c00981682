#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/adam_tensor.h"
#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/elementwise.h"

namespace strata::kernels {
namespace {

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
    AdamScalars scalars{.weight_decay = 0.1};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      scalars.step = static_cast<std::int64_t>(i + 1);
      tensors.push_back(tensor_of(found[i], scalars.step));
      adam_step(expected[i].spans(), scalars, nullptr);
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
      AdamScalars scalars{.weight_decay = 0.1, .decoupled = false, .step = 4};
      adam_step(std::span(&tensor, 1), scalars, nullptr);
      adam_step_reference(plain.spans(), scalars);
      EXPECT_EQ(weights, narrowed(plain.weight, weight)) << name_of(weight);
      EXPECT_EQ(first, narrowed(plain.exp_avg, moment)) << name_of(moment);
      EXPECT_EQ(second, narrowed(plain.exp_avg_sq, moment)) << name_of(moment);
    }
  }
}

TEST(TensorAdam, WithoutBiasCorrectionEveryStepIsTheLast) {
  Tensor found(100);
  Tensor expected(100);
  adam_step(found.spans(), {.bias_correction = false, .step = 1}, nullptr);
  adam_step(expected.spans(), {.step = 1'000'000'000}, nullptr);
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
