// Adam and AdamW, one pass: reads gradient, weight, exp_avg and exp_avg_sq, writes the last three and,
// when asked, the 16-bit copy of the weight.
// Idea: Kingma & Ba 2014 (Adam), Loshchilov & Hutter 2017 (decoupled weight decay). The order of
// operations is that of torch.optim.AdamW, so that fp32 results can be compared bit by bit.
// Threads: pure functions of their spans; adam_step splits the work over `pool` when one is given.
#pragma once

#include <cstddef>
#include <span>

#include "strata/base/dtype.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// All spans of one step; the fp32 ones have equal length and do not overlap.
struct AdamSpans {
  std::span<float> weight;  // fp32 master weights
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  std::span<const float> gradient;
  std::byte* weight16 = nullptr;           // [weight.size()] elements of weight16_dtype, or null
  DType weight16_dtype = DType::kBFloat16;  // bf16 or fp16
};

struct AdamScalars {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;      // true: AdamW; false: Adam with L2 added to the gradient
  std::int64_t step = 1;      // of this update, counted from 1 (bias correction)
  float gradient_scale = 1.0F;  // multiplies the gradient first: clipping and loss scale together
};

void adam_step(const AdamSpans& spans, const AdamScalars& scalars, ThreadPool* pool);

// The readable reference: a plain loop. Same results within 1 ulp (bit-identical where the target has FMA).
void adam_step_reference(const AdamSpans& spans, const AdamScalars& scalars);

}  // namespace strata::kernels
