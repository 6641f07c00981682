// Kernels of the update: Adam and Lion over fp32 masters, over bf16 weights with the remainder of their
// masters (kernels/master_remainder.h), over bf16 weights that are rounded at each step, and what
// sets such remainders. Device code; included by cuda_kernels.cu alone.
#pragma once

#include "cuda_elements.cuh"

namespace {

// Those of kernels/update_constants.h, and two more.
struct UpdateConstants {
  float gradient_scale, decay, l2;
  bool lerp_from_gradient;
  float lerp_weight, beta1, beta2, rest2, correction2_root, eps, negative_step_size;
  int follows_copies;       // a master whose copy was written is what was written
  const float* late_scale;  // null: gradient_scale is known
};
static_assert(sizeof(UpdateConstants) == 56, "as the host passes it");

template <typename Copy>
__device__ float followed(float master, Copy copy) {
  Copy rounded;
  narrow(master, rounded);
  return widen(rounded) == widen(copy) ? master : widen(copy);
}

// Quotients and roots, correctly rounded as the host's are. The compiler branches in each of them for
// numbers far from 1. Here a branch for several elements together sees to those: `near` becomes
// false, and the caller takes __fdiv_rn and __fsqrt_rn. Else the steps are those that follow an
// approximation: each remainder is exact, and the last one decides the rounding.
struct Divisor {
  float value;
  float inverse;

  __device__ explicit Divisor(float of) : value(of) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(of));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-of, inverse, 1.0F), inverse);
  }
  // A dividend of 0, or from 2 ^ -100 to 2 ^ 60; a divisor from 2 ^ -60 to 2 ^ 20.
  __device__ bool takes(float dividend) const {
    const float magnitude = fabsf(dividend);
    return ((dividend == 0.0F) | (magnitude >= 7.888609e-31F)) & (magnitude <= 1.1529215e+18F);
  }
  __device__ bool is_near() const { return (value >= 8.673617e-19F) & (value <= 1048576.0F); }
  __device__ float quotient(float dividend) const {
    const float first = __fmul_rn(dividend, inverse);
    const float second = __fmaf_rn(__fmaf_rn(-value, first, dividend), inverse, first);
    const float third = __fmaf_rn(__fmaf_rn(-value, second, dividend), inverse, second);
    return dividend == 0.0F ? first : third;  // the sign of zero
  }
};

__device__ float near_root(float of, bool& near) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(of));
  const float root = __fmul_rn(of, inverse);
  const float rest = __fmaf_rn(-root, root, of);
  near &= (of == 0.0F) | ((of >= 7.888609e-31F) & (of <= 1.2676506e+30F));
  return of == 0.0F ? of : __fmaf_rn(rest, __fmul_rn(0.5F, inverse), root);
}

// Elements: update_scalar_loop() of kernels/update.cpp, operation by operation.
struct Adam {
  static constexpr bool kSecond = true;  // whether there is a second moment
  template <int kCount>
  __device__ static void update(const UpdateConstants& c, float (&weight)[kCount],
                                float (&m)[kCount], float (&v)[kCount],
                                const float (&gradients)[kCount]) {
    const Divisor correction(c.correction2_root);
    bool near = correction.is_near();
    float step[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float gradient = __fmul_rn(gradients[k], c.gradient_scale);
      if (c.l2 != 0.0F) gradient = __fmaf_rn(c.l2, weight[k], gradient);
      m[k] = __fmaf_rn(c.lerp_weight, __fsub_rn(gradient, m[k]),
                       c.lerp_from_gradient ? gradient : m[k]);
      v[k] = __fmaf_rn(__fmul_rn(c.rest2, gradient), gradient, __fmul_rn(v[k], c.beta2));
      const float root = near_root(v[k], near);
      const Divisor denominator(__fadd_rn(correction.quotient(root), c.eps));
      const float along = __fmul_rn(c.negative_step_size, m[k]);
      near &= denominator.is_near() & denominator.takes(along);
      step[k] = denominator.quotient(along);
    }
    if (!near) {
      for (int k = 0; k < kCount; ++k) {
        const float root = __fdiv_rn(__fsqrt_rn(v[k]), c.correction2_root);
        step[k] = __fdiv_rn(__fmul_rn(c.negative_step_size, m[k]), __fadd_rn(root, c.eps));
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      weight[k] = __fadd_rn(__fmul_rn(weight[k], c.decay), step[k]);
  }
};

struct Lion {
  static constexpr bool kSecond = false;
  template <int kCount>
  __device__ static void update(const UpdateConstants& c, float (&weight)[kCount],
                                float (&m)[kCount], float (&)[kCount],
                                const float (&gradients)[kCount]) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float gradient = __fmul_rn(gradients[k], c.gradient_scale);
      const float direction = __fmaf_rn(gradient, c.lerp_weight, __fmul_rn(m[k], c.beta1));
      const float along = signbit(direction) ? -c.negative_step_size : c.negative_step_size;
      m[k] = __fmaf_rn(gradient, c.rest2, __fmul_rn(m[k], c.beta2));
      weight[k] =
          __fadd_rn(__fmul_rn(weight[k], c.decay), fabsf(direction) > 0.0F ? along : 0.0F);
    }
  }
};

// One element.
template <typename Formula>
__device__ void update_one(const UpdateConstants& c, float& weight, float& m, float& v,
                           float gradient) {
  float weights[1] = {weight}, firsts[1] = {m}, seconds[1] = {v}, gradients[1] = {gradient};
  Formula::template update<1>(c, weights, firsts, seconds, gradients);
  weight = weights[0];
  m = firsts[0];
  v = seconds[0];
}

// False: the late scale is NaN, and the step changes nothing.
__device__ bool takes_scale(UpdateConstants& c) {
  if (c.late_scale == nullptr) return true;
  c.gradient_scale = *c.late_scale;
  return !isnan(c.gradient_scale);
}

// Gradients in fp32 or, if `narrow` is not null, in the 16 bits of the weights.
template <typename Narrow>
struct Gradients {
  const float* wide;
  const Narrow* narrow;

  __device__ float at(std::int64_t i) const { return narrow ? widen(narrow[i]) : wide[i]; }
  // Those of the place p of an array of such packs.
  template <template <typename> class Several>
  __device__ Several<float> several(std::int64_t p) const {
    if (narrow == nullptr) return reinterpret_cast<const Several<float>*>(wide)[p];
    const Several<Narrow> values = reinterpret_cast<const Several<Narrow>*>(narrow)[p];
    Several<float> result;
    for (int k = 0; k < sizeof(values.at) / sizeof(Narrow); ++k) result.at[k] = widen(values.at[k]);
    return result;
  }
  __device__ bool aligned() const {
    return (reinterpret_cast<std::uintptr_t>(wide) | reinterpret_cast<std::uintptr_t>(narrow)) % 16 == 0;
  }
};

template <typename Formula, typename Copy, bool kCopies>
__device__ void update(float* weights, float* exp_avgs, float* exp_avg_sqs,
                     Gradients<Copy> gradients, Copy* copies, std::int64_t numel,
                     UpdateConstants c) {
  if (!takes_scale(c)) return;
  const bool packs = packed(weights) && packed(exp_avgs) && packed(exp_avg_sqs) &&
                     gradients.aligned() && (!kCopies || packed(copies));
  for_elements(
      numel, packs,
      [&](std::int64_t p) {
        Pack<float> w = reinterpret_cast<Pack<float>*>(weights)[p];
        Pack<float> m = reinterpret_cast<Pack<float>*>(exp_avgs)[p];
        Pack<float> v{};
        if (Formula::kSecond) v = reinterpret_cast<Pack<float>*>(exp_avg_sqs)[p];
        const Pack<float> g = gradients.template several<Pack>(p);
        Pack<Copy> copy;
        if (kCopies && c.follows_copies) copy = reinterpret_cast<Pack<Copy>*>(copies)[p];
        for (int k = 0; k < kPack; ++k)
          if (kCopies && c.follows_copies) w.at[k] = followed(w.at[k], copy.at[k]);
        Formula::update(c, w.at, m.at, v.at, g.at);
        for (int k = 0; k < kPack; ++k)
          if (kCopies) narrow(w.at[k], copy.at[k]);
        reinterpret_cast<Pack<float>*>(weights)[p] = w;
        reinterpret_cast<Pack<float>*>(exp_avgs)[p] = m;
        if (Formula::kSecond) reinterpret_cast<Pack<float>*>(exp_avg_sqs)[p] = v;
        if (kCopies) reinterpret_cast<Pack<Copy>*>(copies)[p] = copy;
      },
      [&](std::int64_t i) {
        if (kCopies && c.follows_copies) weights[i] = followed(weights[i], copies[i]);
        float none = 0.0F;
        update_one<Formula>(c, weights[i], exp_avgs[i], Formula::kSecond ? exp_avg_sqs[i] : none,
                            gradients.at(i));
        if (kCopies) narrow(weights[i], copies[i]);
      });
}

template <typename Formula, typename State>
__device__ void rounded_element(const UpdateConstants& c, BFloat16& weight, State& first,
                                State& second, float gradient) {
  float master = widen(weight);
  float m = widen(first);
  float v = Formula::kSecond ? widen(second) : 0.0F;
  update_one<Formula>(c, master, m, v, gradient);
  narrow(m, first);
  if (Formula::kSecond) narrow(v, second);
  narrow(master, weight);
}

template <typename Formula, typename State>
__device__ void update_rounded(BFloat16* weights, State* exp_avgs, State* exp_avg_sqs,
                             Gradients<BFloat16> gradients, std::int64_t numel, UpdateConstants c) {
  if (!takes_scale(c)) return;
  const bool packs =
      packed(weights) && packed(exp_avgs) && packed(exp_avg_sqs) && gradients.aligned();
  for_elements(
      numel, packs,
      [&](std::int64_t p) {
        Pack<BFloat16> w = reinterpret_cast<Pack<BFloat16>*>(weights)[p];
        Pack<State> m = reinterpret_cast<Pack<State>*>(exp_avgs)[p];
        Pack<State> v{};
        if (Formula::kSecond) v = reinterpret_cast<Pack<State>*>(exp_avg_sqs)[p];
        const Pack<float> g = gradients.template several<Pack>(p);
        for (int k = 0; k < kPack; ++k)
          rounded_element<Formula>(c, w.at[k], m.at[k], v.at[k], g.at[k]);
        reinterpret_cast<Pack<BFloat16>*>(weights)[p] = w;
        reinterpret_cast<Pack<State>*>(exp_avgs)[p] = m;
        if (Formula::kSecond) reinterpret_cast<Pack<State>*>(exp_avg_sqs)[p] = v;
      },
      [&](std::int64_t i) {
        State none{};
        rounded_element<Formula>(c, weights[i], exp_avgs[i],
                                 Formula::kSecond ? exp_avg_sqs[i] : none, gradients.at(i));
      });
}

constexpr int kByte = 8;  // elements whose halves_up are one byte: what a thread takes at once

struct Remainder {
  std::uint16_t* low;
  std::uint8_t* halves_up;
};

// Moved by accesses of 16 bytes.
template <typename T>
struct alignas(16) Eight {
  T at[kByte];
};

__device__ float join(BFloat16 weight, std::uint16_t low, bool half_up) {
  const std::uint32_t up = low > 0x8000U || half_up ? 1U : 0U;
  if (up != 0U && (weight.bits & 0x7FFFU) == 0U) return widen(weight);
  return __uint_as_float(((static_cast<std::uint32_t>(weight.bits) - up) << 16) | low);
}

// Splits a master again; returns whether it was an exact half that is rounded up.
__device__ bool split(float master, BFloat16& weight, std::uint16_t& low) {
  const std::uint32_t bits = __float_as_uint(master);
  narrow(master, weight);
  low = static_cast<std::uint16_t>(bits);
  return (bits & 0x1FFFFU) == 0x18000U;
}

template <typename Formula>
__device__ void update_with_remainder(BFloat16* weights, const Remainder& remainder, float* exp_avgs,
                                    float* exp_avg_sqs, Gradients<BFloat16> gradients,
                                    std::int64_t numel, UpdateConstants c) {
  if (!takes_scale(c)) return;
  const auto aligned = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
  const bool eights = aligned(weights) && aligned(remainder.low) && aligned(exp_avgs) &&
                      aligned(exp_avg_sqs) && gradients.aligned();
  const std::int64_t bytes = (numel + kByte - 1) / kByte;
  for (std::int64_t p = first_index(); p < bytes; p += index_stride()) {
    const unsigned before = remainder.halves_up[p];
    unsigned after = 0;
    const std::int64_t left = numel - p * kByte;
    if (eights && left >= kByte) {
      Eight<BFloat16> w = reinterpret_cast<Eight<BFloat16>*>(weights)[p];
      Eight<std::uint16_t> low = reinterpret_cast<Eight<std::uint16_t>*>(remainder.low)[p];
      Eight<float> m = reinterpret_cast<Eight<float>*>(exp_avgs)[p];
      Eight<float> v{};
      if (Formula::kSecond) v = reinterpret_cast<Eight<float>*>(exp_avg_sqs)[p];
      const Eight<float> g = gradients.several<Eight>(p);
      float masters[kByte];
#pragma unroll
      for (int k = 0; k < kByte; ++k)
        masters[k] = join(w.at[k], low.at[k], (before >> k & 1U) != 0);
      Formula::update(c, masters, m.at, v.at, g.at);
#pragma unroll
      for (int k = 0; k < kByte; ++k)
        if (split(masters[k], w.at[k], low.at[k])) after |= 1U << k;
      reinterpret_cast<Eight<BFloat16>*>(weights)[p] = w;
      reinterpret_cast<Eight<std::uint16_t>*>(remainder.low)[p] = low;
      reinterpret_cast<Eight<float>*>(exp_avgs)[p] = m;
      if (Formula::kSecond) reinterpret_cast<Eight<float>*>(exp_avg_sqs)[p] = v;
    } else {
      const int here = static_cast<int>(min(static_cast<std::int64_t>(kByte), left));
      after = before & ~((1U << here) - 1U);  // bits of elements that are not ours
      for (int k = 0; k < here; ++k) {
        const std::int64_t i = p * kByte + k;
        float master = join(weights[i], remainder.low[i], (before >> k & 1U) != 0);
        float none = 0.0F;
        update_one<Formula>(c, master, exp_avgs[i], Formula::kSecond ? exp_avg_sqs[i] : none,
                            gradients.at(i));
        if (split(master, weights[i], remainder.low[i])) after |= 1U << k;
      }
    }
    if (after != before) remainder.halves_up[p] = static_cast<std::uint8_t>(after);
  }
}

// Elements [first, first + numel); a thread takes those of one byte of halves_up.
template <typename From>
__device__ void store_remainder(const Remainder& target, std::int64_t first, const From* source,
                                std::int64_t numel) {
  const std::int64_t end = first + numel;
  const std::int64_t bytes = (end + kByte - 1) / kByte;
  for (std::int64_t p = first / kByte + first_index(); p < bytes; p += index_stride()) {
    const std::int64_t from = max(first, p * kByte);
    const std::int64_t to = min(end, (p + 1) * kByte);
    unsigned halves_up = to - from == kByte ? 0U : target.halves_up[p];
    for (std::int64_t i = from; i < to; ++i) {
      BFloat16 weight;
      const unsigned bit = 1U << (i - p * kByte);
      const bool half_up = split(widen(source[i - first]), weight, target.low[i]);
      halves_up = half_up ? halves_up | bit : halves_up & ~bit;
    }
    target.halves_up[p] = static_cast<std::uint8_t>(halves_up);
  }
}

// kernels::adopt_written().
template <typename From>
__device__ float adopted(float master, From weight) {
  From rounded;
  narrow(master, rounded);
  const float written = widen(weight);
  return widen(rounded) == written ? master : written;
}

template <typename From>
__device__ void adopt_written(float* masters, const From* weights, std::int64_t numel) {
  for_elements(
      numel, packed(masters) && packed(weights),
      [&](std::int64_t p) {
        Pack<float> m = reinterpret_cast<Pack<float>*>(masters)[p];
        const Pack<From> w = reinterpret_cast<const Pack<From>*>(weights)[p];
        for (int k = 0; k < kPack; ++k) m.at[k] = adopted(m.at[k], w.at[k]);
        reinterpret_cast<Pack<float>*>(masters)[p] = m;
      },
      [&](std::int64_t i) { masters[i] = adopted(masters[i], weights[i]); });
}

}  // namespace

extern "C" {

#define STRATA_UPDATE(name, Formula, Copy, copies_too)                                            \
  __global__ void strata_##name(float* weights, float* exp_avgs, float* exp_avg_sqs,              \
                                Gradients<Copy> gradients, void* copies, std::int64_t numel,      \
                                UpdateConstants constants) {                                      \
    update<Formula, Copy, copies_too>(weights, exp_avgs, exp_avg_sqs, gradients,                  \
                                      static_cast<Copy*>(copies), numel, constants);              \
  }
#define STRATA_UPDATE_ROUNDED(name, Formula, State)                                               \
  __global__ void strata_##name(void* weights, void* exp_avgs, void* exp_avg_sqs,                 \
                                Gradients<BFloat16> gradients, std::int64_t numel,                \
                                UpdateConstants constants) {                                      \
    update_rounded<Formula>(static_cast<BFloat16*>(weights), static_cast<State*>(exp_avgs),       \
                            static_cast<State*>(exp_avg_sqs), gradients, numel, constants);       \
  }
#define STRATA_FORMULA(name, Formula)                                                             \
  STRATA_UPDATE(name##_f32, Formula, float, false)                                                \
  STRATA_UPDATE(name##_f16, Formula, Float16, true)                                               \
  STRATA_UPDATE(name##_bf16, Formula, BFloat16, true)                                             \
  STRATA_UPDATE_ROUNDED(name##_rounded_f32, Formula, float)                                       \
  STRATA_UPDATE_ROUNDED(name##_rounded_bf16, Formula, BFloat16)                                   \
  __global__ void strata_##name##_remainder(void* weights, Remainder remainder, float* exp_avgs,  \
                                            float* exp_avg_sqs, Gradients<BFloat16> gradients,    \
                                            std::int64_t numel, UpdateConstants constants) {      \
    update_with_remainder<Formula>(static_cast<BFloat16*>(weights), remainder, exp_avgs,          \
                                   exp_avg_sqs, gradients, numel, constants);                     \
  }
STRATA_FORMULA(adam, Adam)
STRATA_FORMULA(lion, Lion)

__global__ void strata_join_masters(float* masters, const void* weights, Remainder remainder,
                                    std::int64_t first, std::int64_t numel) {
  for (std::int64_t i = first_index(); i < numel; i += index_stride()) {
    const std::int64_t at = first + i;
    masters[i] = join(static_cast<const BFloat16*>(weights)[at], remainder.low[at],
                      (remainder.halves_up[at / kByte] >> (at % kByte) & 1U) != 0);
  }
}

#define STRATA_REMAINDER(name, From)                                                            \
  __global__ void strata_remainder_##name(Remainder target, std::int64_t first,                 \
                                          const void* source, std::int64_t numel) {             \
    store_remainder(target, first, static_cast<const From*>(source), numel);                    \
  }
STRATA_REMAINDER(f64, double)
STRATA_REMAINDER(f32, float)
STRATA_REMAINDER(f16, Float16)
STRATA_REMAINDER(bf16, BFloat16)

#define STRATA_ADOPT(name, From)                                                          \
  __global__ void strata_adopt_##name(float* masters, const void* weights,                \
                                      std::int64_t numel) {                               \
    adopt_written(masters, static_cast<const From*>(weights), numel);                     \
  }
STRATA_ADOPT(f64, double)
STRATA_ADOPT(f32, float)
STRATA_ADOPT(f16, Float16)
STRATA_ADOPT(bf16, BFloat16)

}  // extern "C"
