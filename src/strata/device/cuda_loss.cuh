// The kernel of kernels/vocabulary_loss.h. A block takes a row. It reads the logits twice: once for
// the logarithm of the sum of their exponentials, by the online softmax of Milakov and Gimelshein
// (2018), and once, mostly from the cache, to write gradients. Sums are in an order of its own.
// Device code; included by cuda_kernels.cu alone.
#pragma once

#include "cuda_elements.cuh"

namespace {

// As kernels/vocabulary_loss.h declares it.
struct VocabularyRows {
  void* logits;
  int dtype;
  std::int64_t rows;
  std::int64_t columns;
  const std::int64_t* labels;
  std::int64_t ignored;
  float* losses;
  float scale;
  float softcap;
  bool gradients;
};

constexpr int kLossThreads = 1024;

__device__ float capped(const VocabularyRows& of, float logit) {
  const float scaled = of.scale * logit;
  return of.softcap == 0.0F ? scaled : of.softcap * tanhf(scaled / of.softcap);
}

__device__ float slope_at(const VocabularyRows& of, float value) {
  if (of.softcap == 0.0F) return of.scale;
  const float part = value / of.softcap;
  return of.scale * (1.0F - part * part);
}

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// Calls each(first, column, Count) for the row's elements of this thread: packs of 16 bytes, and
// single ones before and behind those.
template <typename T, typename Each>
__device__ void for_row(T* row, std::int64_t columns, Each each) {
  constexpr int kWide = 16 / sizeof(T);
  const std::int64_t offset = reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T);
  const std::int64_t head = min(columns, (kWide - offset) % kWide);
  const std::int64_t packs = (columns - head) / kWide;
  const std::int64_t tail = head + packs * kWide;
  for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x)
    each(row + head + p * kWide, head + p * kWide, Count<kWide>{});
  const std::int64_t single = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
  if (single < columns) each(row + single, single, Count<1>{});
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Taken {
  T at[kCount];
};

// The largest value so far, and the sum of exponentials less it.
struct OnlineSum {
  float top;
  float sum;
};

__device__ OnlineSum joined(OnlineSum a, OnlineSum b) {
  if (!(a.top <= b.top)) {
    const OnlineSum larger = a;
    a = b;
    b = larger;
  }
  // Equal tops may be infinite; a NaN stays one.
  const float factor = a.top == b.top ? 1.0F : __expf(a.top - b.top);
  return {b.top, b.sum + a.sum * factor};
}

__device__ OnlineSum joined_by_block(OnlineSum mine) {
  __shared__ OnlineSum of_warps[kLossThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    mine = joined(mine, {__shfl_xor_sync(0xFFFFFFFFU, mine.top, step),
                         __shfl_xor_sync(0xFFFFFFFFU, mine.sum, step)});
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = of_warps[threadIdx.x % 32];
  for (int step = 16; step > 0; step /= 2) {
    mine = joined(mine, {__shfl_xor_sync(0xFFFFFFFFU, mine.top, step),
                         __shfl_xor_sync(0xFFFFFFFFU, mine.sum, step)});
  }
  __syncthreads();
  return mine;
}

template <typename T>
__device__ void vocabulary_losses(const VocabularyRows& of) {
  for (std::int64_t index = blockIdx.x; index < of.rows; index += gridDim.x) {
    T* const row = static_cast<T*>(of.logits) + index * of.columns;
    const std::int64_t label = of.labels[index];
    if (label == of.ignored) {
      if (threadIdx.x == 0) of.losses[index] = 0.0F;
      if (of.gradients) {
        for_row(row, of.columns, [](T* at, std::int64_t, auto count) {
          *reinterpret_cast<Taken<T, count.value>*>(at) = {};
        });
      }
      continue;
    }
    const bool known = label >= 0 && label < of.columns;
    const float chosen = known ? capped(of, widen(row[label])) : __int_as_float(0x7FC00000);
    OnlineSum mine{-INFINITY, 0.0F};
    for_row(row, of.columns, [&](T* at, std::int64_t, auto count) {
      const auto in = *reinterpret_cast<const Taken<T, count.value>*>(at);
      float values[count.value];
      float top = mine.top;
      for (int k = 0; k < count.value; ++k) {
        values[k] = capped(of, widen(in.at[k]));
        if (!(values[k] <= top)) top = values[k];
      }
      if (top == -INFINITY) return;
      if (!(top == mine.top)) mine = {top, mine.sum * __expf(mine.top - top)};
      for (int k = 0; k < count.value; ++k) mine.sum += __expf(values[k] - top);
    });
    const OnlineSum all = joined_by_block(mine);
    const float of_all = all.top + logf(all.sum);
    if (threadIdx.x == 0) of.losses[index] = of_all - chosen;
    if (!of.gradients) continue;
    for_row(row, of.columns, [&](T* at, std::int64_t first, auto count) {
      auto& values = *reinterpret_cast<Taken<T, count.value>*>(at);
      auto out = values;
      for (int k = 0; k < count.value; ++k) {
        const float value = capped(of, widen(out.at[k]));
        const float less = value - of_all;
        const float given = known && first + k == label ? expm1f(less) : __expf(less);
        narrow(given * slope_at(of, value), out.at[k]);
      }
      values = out;
    });
  }
}

}  // namespace
