// The kernels of the CUDA device, compiled to a fat binary that the library carries along. All but
// the losses (cuda_loss.cuh) give the same bits as the host's kernels: conversions as strata/kernels/float16.h defines them,
// every operation rounded by itself, sums in the order of strata/kernels/grad_stats.cpp. All are
// bound by memory: 16-byte accesses wherever the arrays allow them.
#include "cuda_update8.cuh"
#include "cuda_elements.cuh"
#include "cuda_loss.cuh"
#include "cuda_norm.cuh"

namespace {

template <typename To, typename From>
__device__ void cast(To* target, const From* source, std::int64_t numel) {
  for_elements(
      numel, packed(target) && packed(source),
      [&](std::int64_t p) {
        const Pack<From> in = reinterpret_cast<const Pack<From>*>(source)[p];
        Pack<To> out;
        for (int k = 0; k < kPack; ++k) narrow(widen(in.at[k]), out.at[k]);
        reinterpret_cast<Pack<To>*>(target)[p] = out;
      },
      [&](std::int64_t i) { narrow(widen(source[i]), target[i]); });
}

template <typename To, typename From>
__device__ void accumulate(To* target, const From* source, std::int64_t numel) {
  for_elements(
      numel, packed(target) && packed(source),
      [&](std::int64_t p) {
        const Pack<From> in = reinterpret_cast<const Pack<From>*>(source)[p];
        Pack<To> out = reinterpret_cast<Pack<To>*>(target)[p];
        for (int k = 0; k < kPack; ++k) {
          narrow(__fadd_rn(widen(out.at[k]), widen(in.at[k])), out.at[k]);
        }
        reinterpret_cast<Pack<To>*>(target)[p] = out;
      },
      [&](std::int64_t i) {
        narrow(__fadd_rn(widen(target[i]), widen(source[i])), target[i]);
      });
}

constexpr int kSourcesMax = 64;

struct SumArguments {
  const void* sources[kSourcesMax];
  int count;
  float scale;
  int accumulate;
};

__device__ float finish_sum(const SumArguments& a, float sum, float before) {
  const float scaled = __fmul_rn(sum, a.scale);
  return a.accumulate != 0 ? __fadd_rn(before, scaled) : scaled;
}

// Slices of several ranks, in their order. A thread has two accesses to each source on their way at
// once: sources may lie in other devices' memory, as far as the link is long.
template <typename From>
__device__ void sum_in_order(float* target, std::int64_t numel, const SumArguments& a) {
  constexpr int kWide = 16 / sizeof(From);  // elements in an access of 16 bytes
  constexpr int kAtOnce = 2;
  struct alignas(16) In {
    From at[kWide];
  };
  struct alignas(16) Out {
    float at[kWide];
  };
  bool packs = reinterpret_cast<std::uintptr_t>(target) % 16 == 0;
  for (int s = 0; s < a.count; ++s) {
    packs = packs && reinterpret_cast<std::uintptr_t>(a.sources[s]) % 16 == 0;
  }
  const std::int64_t whole = packs ? numel / kWide : 0;
  for (std::int64_t first = first_index(); first < whole; first += kAtOnce * index_stride()) {
    Out sums[kAtOnce];
    for (int s = 0; s < a.count; ++s) {
      In in[kAtOnce] = {};
      for (int n = 0; n < kAtOnce; ++n) {
        const std::int64_t p = first + n * index_stride();
        if (p < whole) in[n] = static_cast<const In*>(a.sources[s])[p];
      }
      for (int n = 0; n < kAtOnce; ++n) {
        for (int k = 0; k < kWide; ++k) {
          const float value = widen(in[n].at[k]);
          sums[n].at[k] = s == 0 ? value : __fadd_rn(sums[n].at[k], value);
        }
      }
    }
    for (int n = 0; n < kAtOnce; ++n) {
      const std::int64_t p = first + n * index_stride();
      if (p >= whole) break;
      Out& out = reinterpret_cast<Out*>(target)[p];
      Out before{};
      if (a.accumulate != 0) before = out;
      for (int k = 0; k < kWide; ++k) sums[n].at[k] = finish_sum(a, sums[n].at[k], before.at[k]);
      out = sums[n];
    }
  }
  for_elements(
      numel - whole * kWide, false, [](std::int64_t) {},
      [&](std::int64_t rest) {
        const std::int64_t i = whole * kWide + rest;
        float sum = 0.0F;
        for (int s = 0; s < a.count; ++s) {
          const float value = widen(static_cast<const From*>(a.sources[s])[i]);
          sum = s == 0 ? value : __fadd_rn(sum, value);
        }
        target[i] = finish_sum(a, sum, a.accumulate != 0 ? target[i] : 0.0F);
      });
}

// kernels/fingerprint.h.
__device__ unsigned long long multiplied_halves(unsigned long long word, unsigned long long key) {
  const unsigned low = static_cast<unsigned>(word) + static_cast<unsigned>(key);
  const unsigned high = static_cast<unsigned>(word >> 32) + static_cast<unsigned>(key >> 32);
  return static_cast<unsigned long long>(low) * high;
}

}  // namespace

extern "C" {

#define STRATA_CAST(name, To, From)                                                           \
  __global__ void strata_cast_##name(void* target, const void* source, std::int64_t numel) {  \
    cast(static_cast<To*>(target), static_cast<const From*>(source), numel);                  \
  }
#define STRATA_CASTS_FROM(suffix, From)         \
  STRATA_CAST(f64_##suffix, double, From)       \
  STRATA_CAST(f32_##suffix, float, From)        \
  STRATA_CAST(f16_##suffix, Float16, From)      \
  STRATA_CAST(bf16_##suffix, BFloat16, From)
STRATA_CASTS_FROM(f64, double)
STRATA_CASTS_FROM(f32, float)
STRATA_CASTS_FROM(f16, Float16)
STRATA_CASTS_FROM(bf16, BFloat16)

#define STRATA_ACCUMULATE(name, To, From)                                    \
  __global__ void strata_accumulate_##name(void* target, const void* source, \
                                           std::int64_t numel) {             \
    accumulate(static_cast<To*>(target), static_cast<const From*>(source), numel); \
  }
#define STRATA_ACCUMULATES_FROM(suffix, From)        \
  STRATA_ACCUMULATE(f32_##suffix, float, From)       \
  STRATA_ACCUMULATE(f16_##suffix, Float16, From)     \
  STRATA_ACCUMULATE(bf16_##suffix, BFloat16, From)
STRATA_ACCUMULATES_FROM(f32, float)
STRATA_ACCUMULATES_FROM(f16, Float16)
STRATA_ACCUMULATES_FROM(bf16, BFloat16)

#define STRATA_LOSSES(name, T)                                                          \
  __global__ void __launch_bounds__(kLossThreads) strata_losses_##name(VocabularyRows rows) { \
    vocabulary_losses<T>(rows);                                                        \
  }
STRATA_LOSSES(f32, float)
STRATA_LOSSES(f16, Float16)
STRATA_LOSSES(bf16, BFloat16)

// Whole packs of 16 bytes.
__global__ void strata_copy(uint4* target, const uint4* source, std::int64_t packs) {
  for (std::int64_t p = first_index(); p < packs; p += index_stride()) target[p] = source[p];
}

#define STRATA_SUM(name, From)                                                             \
  __global__ void strata_sum_##name(float* target, std::int64_t numel, SumArguments sums) { \
    sum_in_order<From>(target, numel, sums);                                               \
  }
STRATA_SUM(f32, float)
STRATA_SUM(f16, Float16)
STRATA_SUM(bf16, BFloat16)

// Block (p, y) takes its share of piece p: kernels/fingerprint.h. Sums of integers come to the same
// bits in any order.
__global__ void strata_fingerprints(unsigned long long* sums, const unsigned char* bytes,
                                    std::int64_t size, std::int64_t piece) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * piece;
  const std::int64_t length = min(piece, size - begin);
  const std::int64_t whole = length / 8;
  const unsigned char* from = bytes + begin;
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % 8 == 0;
  unsigned long long first = 0;
  unsigned long long second = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.y) * blockDim.x;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  for (; i <= whole; i += stride) {
    unsigned long long word = 0;
    if (i < whole && aligned) {
      word = reinterpret_cast<const unsigned long long*>(from)[i];
    } else {
      for (std::int64_t k = i * 8; k < min(length, i * 8 + 8); ++k) {
        word |= static_cast<unsigned long long>(from[k]) << (8 * (k - i * 8));
      }
      if (i * 8 >= length) break;
    }
    const auto place = static_cast<unsigned long long>(i) + 1;
    first += multiplied_halves(word, place * 0x6a09e667f3bcc909ULL);
    second += multiplied_halves(word, place * 0x3c6ef372fe94f82bULL);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    first += __shfl_down_sync(0xFFFFFFFFU, first, width);
    second += __shfl_down_sync(0xFFFFFFFFU, second, width);
  }
  if (threadIdx.x % kLanes == 0) {
    atomicAdd(&sums[2 * blockIdx.x], first);
    atomicAdd(&sums[2 * blockIdx.x + 1], second);
  }
}

}  // extern "C"
