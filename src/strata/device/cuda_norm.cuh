// Kernels of the gradients' norm: sums of squares in the order of kernels/grad_stats.cpp, and the
// factor that follows from them. Device code; included by cuda_kernels.cu alone.
#pragma once

#include "cuda_elements.cuh"

namespace {

constexpr int kLanes = 32;           // partial sums of a chunk: the threads of one warp
constexpr std::int64_t kChunk = 65536;

// As cuda_kernels.h declares them.
struct SquareArguments {
  struct Array {
    const float* values;
    std::int64_t numel;
    std::int64_t first_chunk;
  };
  Array at[128];
  std::int64_t chunks;
  int count;
};

// kernels/grad_stats.h.
struct GradientFactor {
  double sum_of_squares;
  float factor;
};

}  // namespace

extern "C" {

// Which array a chunk belongs to: the last that begins at or before it.
__device__ int array_of(const SquareArguments& arrays, std::int64_t chunk) {
  int low = 0;
  int high = arrays.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (arrays.at[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One warp a chunk of kChunk elements: lane i adds up the squares of elements i, i + 32, ...
__global__ void strata_chunk_sums(double* sums, SquareArguments arrays) {
  const int lane = threadIdx.x % kLanes;
  const std::int64_t warps = index_stride() / kLanes;
  for (std::int64_t chunk = first_index() / kLanes; chunk < arrays.chunks; chunk += warps) {
    const SquareArguments::Array& array = arrays.at[array_of(arrays, chunk)];
    const float* const values = array.values;
    const std::int64_t begin = (chunk - array.first_chunk) * kChunk;
    const std::int64_t end = min(begin + kChunk, array.numel);
    double sum = 0.0;
    std::int64_t i = begin + lane;
    // The additions wait for each other, memory need not: the next values are on their way while
    // these are added.
    constexpr int kTogether = 16;
    constexpr std::int64_t kStep = kTogether * kLanes;
    float next[kTogether];
    const auto load = [&](std::int64_t from) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) next[k] = values[from + k * kLanes];
    };
    const auto whole = [&](std::int64_t from) { return from + (kTogether - 1) * kLanes < end; };
    if (whole(i)) load(i);
    while (whole(i)) {
      float now[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) now[k] = next[k];
      i += kStep;
      if (whole(i)) load(i);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const double value = now[k];
        sum = __fma_rn(value, value, sum);
      }
    }
    for (; i < end; i += kLanes) {
      const double value = values[i];
      sum = __fma_rn(value, value, sum);
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      sum += __shfl_down_sync(0xFFFFFFFFU, sum, width);
    }
    if (lane == 0) sums[chunk] = sum;
  }
}

// A warp adds up doubles in their order.
__device__ double sum_of(const double* values, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t base = 0; base < count; base += kLanes) {
    const std::int64_t mine = base + threadIdx.x;
    const double value = mine < count ? values[mine] : 0.0;
    const int here = static_cast<int>(min(static_cast<std::int64_t>(kLanes), count - base));
    for (int k = 0; k < here; ++k) sum += __shfl_sync(0xFFFFFFFFU, value, k);
  }
  return sum;
}

// One warp, a block, an array: its chunks' sums.
__global__ void strata_totals(double* totals, const double* sums, SquareArguments arrays) {
  const int array = static_cast<int>(blockIdx.x);
  const std::int64_t first = arrays.at[array].first_chunk;
  const std::int64_t end = array + 1 < arrays.count ? arrays.at[array + 1].first_chunk
                                                    : arrays.chunks;
  const double sum = sum_of(sums + first, end - first);
  if (threadIdx.x == 0) totals[array] = sum;
}

// One warp: kernels/grad_stats.cpp, operation by operation.
__global__ void strata_gradient_factor(GradientFactor* result, const double* sums,
                                       std::int64_t count, double loss_scale, double clipping) {
  const double sum = sum_of(sums, count);
  if (threadIdx.x != 0) return;
  double scale = __ddiv_rn(1.0, loss_scale);
  if (clipping > 0.0) {
    const double norm = __ddiv_rn(__dsqrt_rn(sum), loss_scale);
    const double most = __ddiv_rn(clipping, __dadd_rn(norm, 1e-6));
    scale = __dmul_rn(scale, most < 1.0 ? most : 1.0);
  }
  result->sum_of_squares = sum;
  result->factor = isfinite(sum) ? __double2float_rn(scale) : __uint_as_float(0x7FC00000U);
}

}  // extern "C"
