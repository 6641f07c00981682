// One update of weights in one pass, by the formula of Adam, AdamW or Lion: reads gradient, weight
// and states, writes the last two and, when asked, the 16-bit copy of the weight.
// Idea: Kingma & Ba 2014 (Adam), Loshchilov & Hutter 2017 (decoupled weight decay), Chen et al.
// 2023 (Lion).
//
// States are fp32, bf16 where weights are rounded, or have 8 bits (states8.h). Those are decoded,
// updated in fp32 and encoded; the weight is made of the values before they are encoded.
//
// Bits: scalars are computed in fp64 and rounded once; then every operation rounds to fp32, three
// of them as fused multiply-adds, in the order of torch's for-loop on AVX2 and AVX-512. A result
// depends on nothing but its own element's inputs. Against torch 2.11 on CPU in fp32, AdamW and
// Adam, with and without weight decay:
//   fused=True: bit-identical for tensors whose numel is a multiple of 16. torch computes its own
//     tails in fp64: some are a few ulp off each step.
//   for-loop and foreach (one of them is the default): exp_avg and exp_avg_sq of AdamW are
//     bit-identical. So is the weight, and all of Adam with L2, wherever torch's sqrt rounds
//     correctly. The MKL inside torch does not on AMD processors: up to a quarter of its roots are
//     1 ulp off, which moves an update by 1e-7 of itself.
// Lion has the bits of strata.ops.lion in fp32, which computes it in torch's operations.
//
// Threads: pure functions of their spans; update_step() splits the work over `pool` when one is
// given. Errors: UsageError when weight16_dtype is no 16-bit floating type, or not bf16 where the
// masters are found in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/kernels/master_remainder.h"
#include "strata/kernels/states8.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// bf16 moments, each as long as the gradient.
struct Moments16 {
  std::byte* exp_avg = nullptr;
  std::byte* exp_avg_sq = nullptr;
};

// States in 8 bits.
struct States8 {
  Codes8 exp_avg;     // signed
  Codes8 exp_avg_sq;  // unsigned; unused by Lion
};

// Gradients of 16 bits, bf16 or fp16.
struct Gradients16 {
  const std::byte* values = nullptr;
  DType dtype = DType::kBFloat16;
  std::size_t numel = 0;
};

// All spans of one step; the fp32 ones have equal length and do not overlap.
struct UpdateSpans {
  std::span<float> weight;      // fp32 master weights; empty with a remainder, and where rounded
  std::span<float> exp_avg;     // empty where moments16 or states8 are there
  std::span<float> exp_avg_sq;  // the same, and empty for Lion
  std::span<const float> gradient;
  std::byte* weight16 = nullptr;            // [numel()] elements of weight16_dtype, or null
  DType weight16_dtype = DType::kBFloat16;  // bf16 or fp16
  // weight16 comes with the rounded masters. If it holds another number than its rounded master,
  // other code has written the weight since, and the written number becomes the master.
  bool follows_weight16 = false;
  // Where `low` is not null, the masters are weight16, bf16, and this: both are read and written.
  MasterRemainder remainder = {};
  bool has_remainder() const { return remainder.low != nullptr; }
  // weight16, bf16, is its own master: read, updated in fp32, and rounded.
  bool rounds_weight16 = false;
  // Then the moments may be bf16: the weight is made of their new fp32 values, which are rounded
  // after it.
  Moments16 moments16 = {};
  bool has_moments16() const { return moments16.exp_avg != nullptr; }
  // In 8 bits; the first element of the spans begins a block.
  States8 states8 = {};
  bool has_states8() const { return states8.exp_avg.codes != nullptr; }
  Gradients16 gradient16 = {};  // instead of `gradient`; for a device in the dtype of weight16
  // Device::update_step() reaches some spans over a link: few processors keep up with it.
  bool far = false;
  std::size_t numel() const { return gradient.size() + gradient16.numel; }
};

// kLion: the weight goes one length, lr, along the sign of a mean of gradient and exp_avg;
// none where that is zero or NaN.
enum class Formula : std::uint8_t { kAdam, kLion };

struct UpdateScalars {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool bias_correction = true;  // false: moments are not corrected, and `step` has no effect
  bool decoupled = true;        // true: AdamW, Lion; false: Adam with L2 added to the gradient
  Formula formula = Formula::kAdam;
  // Second moments in 8 bits: what is positive stays so, however small in its block.
  bool keeps_positive = true;
  std::int64_t step = 1;        // of this update, counted from 1 (bias correction)
  float gradient_scale = 1.0F;  // multiplies the gradient first: clipping and loss scale together
  // For Device::update_step(). If not null, the processor that runs the step reads gradient_scale
  // from here when the step runs, so the value lies in that device's memory. NaN: the step changes
  // nothing.
  const float* late_scale = nullptr;

  bool operator==(const UpdateScalars&) const = default;
};

void update_step(const UpdateSpans& spans, const UpdateScalars& scalars, ThreadPool* pool);

}  // namespace strata::kernels
