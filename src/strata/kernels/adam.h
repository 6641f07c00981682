// Adam and AdamW over the tensors of a program without an engine: update_step() over many of them
// at once, in the dtypes that they have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/kernels/update.h"

namespace strata::kernels {

// Updates tensors of fp32, bf16 or fp16 in any mix,
// all of one step at once. The update is update_step() in fp32: 16-bit elements are
// widened piece by piece, in the cache, and results are rounded once. Tensors of one call share the
// threads: a thousand small ones cost as little as one large one. Threads: pure functions of their
// arrays; work is split over `pool` when one is given. Results do not depend on it. Errors:
// UsageError for another element type, before anything is written.
//
// Arrays of `numel` elements, aligned as their elements are, that do not overlap.
struct AdamTensor {
  std::byte* weight = nullptr;
  DType weight_dtype = DType::kFloat32;
  std::byte* exp_avg = nullptr;
  std::byte* exp_avg_sq = nullptr;
  DType moment_dtype = DType::kFloat32;
  const std::byte* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;
  Numel numel;
  std::int64_t step = 1;  // of this update, counted from 1
};

// `scalars` but for their step, which is each tensor's own; their late_scale is null.
void adam_step(std::span<const AdamTensor> tensors, const UpdateScalars& scalars, ThreadPool* pool);

}  // namespace strata::kernels
