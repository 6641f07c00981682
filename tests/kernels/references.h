// The readable references of the kernels: plain loops with the same bits, which tests compare with
// the vectorized kernels, the devices' and the engine's results. Pure; single-threaded.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>

#include "strata/base/error.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/elementwise_loops.h"
#include "strata/kernels/grad_stats.h"
#include "strata/kernels/recipe_scalars.h"
#include "strata/kernels/update_constants.h"

namespace strata::kernels {

// The memory of `numel` elements, in whole lines of 64 bytes so that one may follow another, and
// the arrays in it.
inline Bytes remainder_bytes(Numel numel) {
  return align_up(Bytes(2 * numel.value + (numel.value + 7) / 8), 64_B);
}
inline MasterRemainder remainder_over(std::span<std::byte> memory, Numel numel) {
  return {reinterpret_cast<std::uint16_t*>(memory.data()),
          reinterpret_cast<std::uint8_t*>(memory.data() + 2 * numel.size())};
}

inline void cast_reference(std::byte* target, DType target_dtype, const std::byte* source,
                           DType source_dtype, Numel numel) {
  check_cast(target_dtype, source_dtype);
  if (target_dtype == source_dtype) {
    const std::size_t bytes = bytes_of(numel, target_dtype).size();
    if (bytes > 0) std::memcpy(target, source, bytes);
    return;
  }
  with_wide_storage(target_dtype, [&](auto to) {
    with_wide_storage(source_dtype, [&](auto from) {
      cast_scalars<decltype(to), decltype(from)>(target, source, 0, numel.size());
    });
  });
}

inline void accumulate_reference(std::byte* target, DType target_dtype, const std::byte* source,
                                 DType source_dtype, Numel numel) {
  check_accumulate(target_dtype, source_dtype);
  with_storage(target_dtype, [&](auto to) {
    with_storage(source_dtype, [&](auto from) {
      accumulate_scalars<decltype(to), decltype(from)>(target, source, 0, numel.size());
    });
  });
}

inline void sum_in_order_reference(std::span<float> target,
                                   std::span<const std::byte* const> sources, DType dtype,
                                   float scale, bool accumulate) {
  check_sum(sources.size(), dtype);
  const SumTask task{target.data(), sources, scale, accumulate};
  with_storage(dtype, [&](auto from) { sum_scalars<decltype(from)>(task, 0, target.size()); });
}

inline void adopt_written_reference(std::span<float> masters, const std::byte* weights,
                                    DType dtype) {
  check_cast(DType::kFloat32, dtype);
  with_wide_storage(dtype, [&](auto from) {
    adopt_scalars<decltype(from)>(masters.data(), weights, 0, masters.size());
  });
}

inline void update_reference(const UpdateSpans& spans, const UpdateScalars& scalars) {
  check_update(spans, scalars);
  update_scalar_loop(spans, UpdateConstants(scalars), scalars.formula);
}

// Chunks of kChunk elements; within one, element i goes to the partial sum i % kLanes; partial sums
// are added pairwise, chunks in their order.
inline double sum_of_squares_reference(std::span<const float> gradients) {
  constexpr std::size_t kLanes = 32;
  constexpr std::size_t kChunk = 65536;
  double sum = 0.0;
  while (!gradients.empty()) {
    const std::span<const float> chunk = gradients.first(std::min(kChunk, gradients.size()));
    gradients = gradients.subspan(chunk.size());
    std::array<double, kLanes> sums{};
    for (std::size_t i = 0; i < chunk.size(); ++i) {
      const double value = chunk[i];
      sums[i % kLanes] += value * value;
    }
    for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
      for (std::size_t i = 0; i < width; ++i) sums[i] += sums[i + width];
    }
    sum += sums[0];
  }
  return sum;
}

inline void replay_reference(std::span<const RecipeStep> recipe, Numel begin, Numel numel,
                             std::byte* target, DType dtype) {
  for (Numel i; i < numel; i += Numel(1)) {
    const std::int64_t index = (begin + i).value;
    float value = 0.0F;
    for (const RecipeStep& step : recipe) {
      for_each_run(step.region, index, index + 1, [&](std::int64_t first, std::int64_t last) {
        apply_scalars(step, first, last, &value);
      });
    }
    cast_reference(target + bytes_of(i, dtype).size(), dtype,
                   reinterpret_cast<const std::byte*>(&value), DType::kFloat32, Numel(1));
  }
}

}  // namespace strata::kernels
