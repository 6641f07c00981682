// Conversions and sums of floating-point arrays (fp32, bf16, fp16; cast also fp64). Rounding is to
// nearest even; a NaN stays a NaN. Arrays of one call do not overlap.
// Threads: pure functions of their arrays; work is split over `pool` when one is given.
#pragma once

#include <cstddef>
#include <span>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// target = source, converted. Equal types are a copy.
void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
          Numel numel, ThreadPool* pool);

// target += source: added in fp32, rounded once to the target's type.
void accumulate(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                Numel numel, ThreadPool* pool);

// target = scale * (s_0 + s_1 + ...), or target += that; summed in fp32 in the order of `sources`, so
// the result does not depend on threads. Each source holds target.size() elements of `dtype`.
void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                  float scale, bool accumulate, ThreadPool* pool);

}  // namespace strata::kernels
