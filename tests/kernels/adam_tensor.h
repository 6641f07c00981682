// A tensor under training as the tests of Adam make one, and the hyper-parameters that they try.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/every_target.h"
#include "strata/kernels/update.h"

namespace strata::kernels {

// One tensor under training; `offset` elements are left free before it, so that it starts
// unaligned.
struct Tensor {
  std::size_t offset;
  std::vector<float> weight, exp_avg, exp_avg_sq, gradient;
  std::vector<std::uint16_t> weight16;

  explicit Tensor(std::size_t numel, std::size_t start = 0)
      : offset(start),
        weight(plain_numbers(numel + start, 1, 0.02F)),
        exp_avg(plain_numbers(numel + start, 2, 1e-3F)),
        exp_avg_sq(plain_numbers(numel + start, 3, 1e-3F)),
        gradient(plain_numbers(numel + start, 4, 1e-3F)),
        weight16(numel + start) {
    for (float& value : exp_avg_sq) value *= value;
  }

  UpdateSpans spans() {
    return {.weight = std::span(weight).subspan(offset),
            .exp_avg = std::span(exp_avg).subspan(offset),
            .exp_avg_sq = std::span(exp_avg_sq).subspan(offset),
            .gradient = std::span(gradient).subspan(offset)};
  }

  UpdateSpans spans_with_copy(DType dtype) {
    UpdateSpans result = spans();
    result.weight16 = std::as_writable_bytes(std::span(weight16)).data() + 2 * offset;
    result.weight16_dtype = dtype;
    return result;
  }
};

inline void expect_same(const std::vector<float>& found, const std::vector<float>& expected,
                        const char* what) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(same_bits(found[i], expected[i]))
        << what << "[" << i << "]: " << found[i] << " is not " << expected[i];
  }
}

inline void expect_same(const Tensor& found, const Tensor& expected) {
  expect_same(found.weight, expected.weight, "weight");
  expect_same(found.exp_avg, expected.exp_avg, "exp_avg");
  expect_same(found.exp_avg_sq, expected.exp_avg_sq, "exp_avg_sq");
  EXPECT_EQ(found.weight16, expected.weight16);
}

inline std::vector<UpdateScalars> variants() {
  return {
      {.step = 1},
      {.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.1, .step = 7, .gradient_scale = 0.37F},
      {.weight_decay = 0.1, .decoupled = false, .step = 3, .gradient_scale = 1.0F / 65536.0F},
      {.beta1 = 0.4, .weight_decay = 0.01, .step = 2},  // exp_avg moves more than half of the way
      {.beta1 = 0.0, .beta2 = 0.0, .step = 100000},
  };
}

}  // namespace strata::kernels
