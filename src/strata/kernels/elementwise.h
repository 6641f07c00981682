// Conversions and sums of floating-point arrays (fp32, bf16, fp16; cast also fp64). Rounding is to
// nearest even; a NaN stays a NaN. Arrays of one call do not overlap and need no alignment beyond
// that of their elements. Every machine gives the same bits (of NaNs: that they are NaNs).
// Threads: pure functions of their arrays; work is split over `pool` when one is given and a MiB of
// fp32 or more is read.
// Errors: UsageError for an element type that the operation does not have.
#pragma once

#include <cstddef>
#include <span>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// target = source, converted. Equal types are a copy. Between fp64 and a 16-bit type the way leads
// over fp32, as in torch: two roundings.
void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
          Numel numel, ThreadPool* pool);

// target += source: added in fp32, rounded once to the target's type.
void accumulate(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                Numel numel, ThreadPool* pool);

// target = scale * (s_0 + s_1 + ...), or target += that; every operation rounds to fp32, in the
// order of `sources`, so the result depends neither on threads nor on where a slice begins. At
// least one source; each holds target.size() elements of `dtype`.
void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                  float scale, bool accumulate, ThreadPool* pool);

// Masters take the values of weights that other code has written: masters[i] = weights[i] wherever
// masters[i] does not round to it.
void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                   ThreadPool* pool);

}  // namespace strata::kernels
