// The kernels of the CUDA device, compiled to a fat binary that the library carries along. They
// give the same bits as the host's kernels: conversions as strata/kernels/float16.h defines them,
// every operation rounded by itself, sums in the order of strata/kernels/grad_stats.cpp. All are
// bound by memory: 16-byte accesses wherever the arrays allow them.
#include "cuda_elements.cuh"
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

// Slices of several ranks, in their order.
template <typename From>
__device__ void sum_in_order(float* target, std::int64_t numel, const SumArguments& a) {
  constexpr int kWide = 16 / sizeof(From);  // elements in an access of 16 bytes
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
  for (std::int64_t p = first_index(); p < whole; p += index_stride()) {
    Out sum;
    for (int s = 0; s < a.count; ++s) {
      const In in = static_cast<const In*>(a.sources[s])[p];
      for (int k = 0; k < kWide; ++k) {
        sum.at[k] = s == 0 ? widen(in.at[k]) : __fadd_rn(sum.at[k], widen(in.at[k]));
      }
    }
    Out& out = reinterpret_cast<Out*>(target)[p];
    Out before{};
    if (a.accumulate != 0) before = out;
    for (int k = 0; k < kWide; ++k) sum.at[k] = finish_sum(a, sum.at[k], before.at[k]);
    out = sum;
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

struct AdamConstants {
  float gradient_scale, decay, l2, lerp_weight, beta2, square_weight, correction2_root, eps,
      negative_step_size;
  int lerp_from_gradient;
  const float* late_scale;  // null: gradient_scale is known
};

// One element: kernels/adam_reference.cpp, operation by operation.
__device__ void adam_element(const AdamConstants& c, float& weight, float& m, float& v,
                             float gradient) {
  gradient = __fmul_rn(gradient, c.gradient_scale);
  if (c.l2 != 0.0F) gradient = __fmaf_rn(c.l2, weight, gradient);
  m = __fmaf_rn(c.lerp_weight, __fsub_rn(gradient, m), c.lerp_from_gradient ? gradient : m);
  v = __fmaf_rn(__fmul_rn(c.square_weight, gradient), gradient, __fmul_rn(v, c.beta2));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.correction2_root), c.eps);
  weight = __fadd_rn(__fmul_rn(weight, c.decay),
                     __fdiv_rn(__fmul_rn(c.negative_step_size, m), denominator));
}

template <typename Copy, bool kCopies>
__device__ void adam(float* weights, float* exp_avgs, float* exp_avg_sqs, const float* gradients,
                     Copy* copies, std::int64_t numel, AdamConstants c) {
  if (c.late_scale != nullptr) {
    c.gradient_scale = *c.late_scale;
    if (isnan(c.gradient_scale)) return;
  }
  const bool packs = packed(weights) && packed(exp_avgs) && packed(exp_avg_sqs) &&
                     packed(gradients) && (!kCopies || packed(copies));
  for_elements(
      numel, packs,
      [&](std::int64_t p) {
        Pack<float> w = reinterpret_cast<Pack<float>*>(weights)[p];
        Pack<float> m = reinterpret_cast<Pack<float>*>(exp_avgs)[p];
        Pack<float> v = reinterpret_cast<Pack<float>*>(exp_avg_sqs)[p];
        const Pack<float> g = reinterpret_cast<const Pack<float>*>(gradients)[p];
        Pack<Copy> copy;
        for (int k = 0; k < kPack; ++k) {
          adam_element(c, w.at[k], m.at[k], v.at[k], g.at[k]);
          if (kCopies) narrow(w.at[k], copy.at[k]);
        }
        reinterpret_cast<Pack<float>*>(weights)[p] = w;
        reinterpret_cast<Pack<float>*>(exp_avgs)[p] = m;
        reinterpret_cast<Pack<float>*>(exp_avg_sqs)[p] = v;
        if (kCopies) reinterpret_cast<Pack<Copy>*>(copies)[p] = copy;
      },
      [&](std::int64_t i) {
        adam_element(c, weights[i], exp_avgs[i], exp_avg_sqs[i], gradients[i]);
        if (kCopies) narrow(weights[i], copies[i]);
      });
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

__global__ void strata_scale(float* target, const float* source, float factor,
                             std::int64_t numel) {
  for_elements(
      numel, packed(target) && packed(source),
      [&](std::int64_t p) {
        Pack<float> value = reinterpret_cast<const Pack<float>*>(source)[p];
        for (int k = 0; k < kPack; ++k) value.at[k] = __fmul_rn(value.at[k], factor);
        reinterpret_cast<Pack<float>*>(target)[p] = value;
      },
      [&](std::int64_t i) { target[i] = __fmul_rn(source[i], factor); });
}

#define STRATA_ADAM(name, Copy, copies_too)                                                      \
  __global__ void strata_adam_##name(float* weights, float* exp_avgs, float* exp_avg_sqs,        \
                                     const float* gradients, void* copies, std::int64_t numel,   \
                                     AdamConstants constants) {                                  \
    adam<Copy, copies_too>(weights, exp_avgs, exp_avg_sqs, gradients, static_cast<Copy*>(copies), \
                           numel, constants);                                                    \
  }
STRATA_ADAM(f32, float, false)
STRATA_ADAM(f16, Float16, true)
STRATA_ADAM(bf16, BFloat16, true)

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
    unsigned long long place = (static_cast<unsigned long long>(i) + 1) * 0x6a09e667f3bcc909ULL;
    place = (place ^ (place >> 32)) | 1;
    word = (word ^ (word >> 32)) * place;
    word ^= word >> 32;
    const unsigned long long again = word * (place * 0x3c6ef372fe94f82bULL);
    first += word;
    second += again ^ (again >> 32);
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
