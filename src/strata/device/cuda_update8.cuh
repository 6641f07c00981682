// Kernels of the update with states of 8 bits: kernels/states8.h, operation by operation. A warp
// takes a block of 256 elements, a thread eight of them; the tables of values are in shared memory.
// Device code; included by cuda_kernels.cu alone.
#pragma once

#include "cuda_update.cuh"

namespace {

constexpr int kBlock8 = 256;
constexpr int kDecades8 = 7;

// As the host passes it.
struct Map8 {
  float values[256];
  float starts[kDecades8 + 1];
  float slopes[kDecades8];
  float offsets[kDecades8];
  float lasts[kDecades8];
  float top;
  float zero;
};

struct Codes8 {
  std::uint8_t* codes;
  float* scales;
};

struct States8 {
  Codes8 exp_avg;
  Codes8 exp_avg_sq;
};

struct Maps8 {
  Map8 exp_avg;
  Map8 exp_avg_sq;
  int keeps_positive;
};

struct alignas(8) Codes {
  std::uint8_t at[kByte];
};

__device__ float number8(const Map8& map, float magnitude) {
  float slope = map.slopes[0];
  float offset = map.offsets[0];
  float last = map.lasts[0];
#pragma unroll
  for (int i = 1; i < kDecades8; ++i) {
    if (magnitude > map.starts[i]) {
      slope = map.slopes[i];
      offset = map.offsets[i];
      last = map.lasts[i];
    }
  }
  const float number = fminf(truncf(__fmaf_rn(magnitude, slope, offset)), last);
  if (magnitude > map.starts[kDecades8]) return map.top;
  return magnitude > map.starts[0] ? number : 0.0F;
}

// The eight elements of a thread, of which the first `here` exist: by accesses of 16 bytes where all
// do. The others keep their values.
template <typename T>
__device__ bool is_whole(const T* from, int here) {
  return here == kByte && reinterpret_cast<std::uintptr_t>(from) % alignof(Eight<T>) == 0;
}
template <typename T>
__device__ void load8(const T* from, int here, T (&to)[kByte]) {
  if (is_whole(from, here)) {
    const Eight<T> all = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
    for (int k = 0; k < kByte; ++k) to[k] = all.at[k];
  } else {
    for (int k = 0; k < kByte; ++k)
      if (k < here) to[k] = from[k];
  }
}
template <typename T>
__device__ void store8(T* to, int here, const T (&from)[kByte]) {
  if (is_whole(to, here)) {
    Eight<T> all;
#pragma unroll
    for (int k = 0; k < kByte; ++k) all.at[k] = from[k];
    *reinterpret_cast<Eight<T>*>(to) = all;
  } else {
    for (int k = 0; k < kByte; ++k)
      if (k < here) to[k] = from[k];
  }
}
__device__ bool are_aligned(const Codes8& state) {
  return reinterpret_cast<std::uintptr_t>(state.codes) % alignof(Codes) == 0;
}
__device__ void load_codes(const Codes8& state, std::int64_t at, int here, Codes& codes) {
  if (here == kByte && are_aligned(state)) {
    codes = *reinterpret_cast<const Codes*>(state.codes + at);
  } else {
    for (int k = 0; k < here; ++k) codes.at[k] = state.codes[at + k];
  }
}
template <typename Narrow>
__device__ void load_gradients(const Gradients<Narrow>& gradients, std::int64_t at, int here,
                               float (&values)[kByte]) {
  if (gradients.narrow == nullptr) return load8(gradients.wide + at, here, values);
  Narrow narrow[kByte] = {};
  load8(gradients.narrow + at, here, narrow);
  for (int k = 0; k < kByte; ++k) values[k] = widen(narrow[k]);
}

template <bool kSigned>
__device__ void store_state(const Map8& map, const Codes8& state, std::int64_t at, int here,
                            const float (&values)[kByte], bool keeps_positive) {
  float largest = 0.0F;
  for (int k = 0; k < kByte; ++k)
    if (k < here) largest = fmaxf(largest, fabsf(values[k]));
  for (int lanes = 16; lanes > 0; lanes /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, lanes));
  float scale = 0.0F;
  float inverse = 0.0F;
  if (largest != 0.0F) {
    scale = fminf(fmaxf(largest, 1.17549435e-38F), 3.402823466e+38F);
    inverse = __fdiv_rn(1.0F, scale);
  }
  if (at % kBlock8 == 0 && here > 0) state.scales[at / kBlock8] = scale;
  Codes codes;
  for (int k = 0; k < kByte; ++k) {
    float number = number8(map, __fmul_rn(fabsf(values[k]), inverse));
    if (keeps_positive && values[k] > 0.0F) number = fmaxf(number, 1.0F);
    if (kSigned)
      number = values[k] < 0.0F ? map.zero - fminf(number, map.zero) : map.zero + number;
    codes.at[k] = static_cast<std::uint8_t>(number);
  }
  if (here == kByte && are_aligned(state)) {
    *reinterpret_cast<Codes*>(state.codes + at) = codes;
  } else {
    for (int k = 0; k < here; ++k) state.codes[at + k] = codes.at[k];
  }
}

// Where the masters are, and what else of them is written; eight elements at a time.
template <typename Copy, bool kCopies>
struct Float32Masters {
  float* weights;
  Copy* copies;

  __device__ void load(const UpdateConstants& c, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    load8(weights + at, here, masters);
    if (kCopies && c.follows_copies) {
      Copy written[kByte] = {};
      load8(copies + at, here, written);
      for (int k = 0; k < kByte; ++k) masters[k] = followed(masters[k], written[k]);
    }
  }
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    store8(weights + at, here, masters);
    if (kCopies) {
      Copy written[kByte];
      for (int k = 0; k < kByte; ++k) narrow(masters[k], written[k]);
      store8(copies + at, here, written);
    }
  }
};

struct JoinedMasters {
  BFloat16* weights;
  Remainder remainder;

  __device__ void load(const UpdateConstants&, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    const unsigned halves_up = here > 0 ? remainder.halves_up[at / kByte] : 0U;
    BFloat16 rounded[kByte] = {};
    std::uint16_t low[kByte] = {};
    load8(weights + at, here, rounded);
    load8(remainder.low + at, here, low);
    for (int k = 0; k < kByte; ++k)
      masters[k] = join(rounded[k], low[k], (halves_up >> k & 1U) != 0);
  }
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    if (here == 0) return;
    unsigned halves_up = remainder.halves_up[at / kByte] & ~((1U << here) - 1U);  // not ours
    BFloat16 rounded[kByte];
    std::uint16_t low[kByte];
    for (int k = 0; k < kByte; ++k)
      if (split(masters[k], rounded[k], low[k]) && k < here) halves_up |= 1U << k;
    store8(weights + at, here, rounded);
    store8(remainder.low + at, here, low);
    remainder.halves_up[at / kByte] = static_cast<std::uint8_t>(halves_up);
  }
};

struct RoundedMasters {
  BFloat16* weights;

  __device__ void load(const UpdateConstants&, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    BFloat16 rounded[kByte] = {};
    load8(weights + at, here, rounded);
    for (int k = 0; k < kByte; ++k) masters[k] = widen(rounded[k]);
  }
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    BFloat16 rounded[kByte];
    for (int k = 0; k < kByte; ++k) narrow(masters[k], rounded[k]);
    store8(weights + at, here, rounded);
  }
};

template <typename Formula, typename Masters, typename Narrow>
__device__ void update8(const Masters& masters, const States8& states, Gradients<Narrow> gradients,
                        std::int64_t numel, UpdateConstants c, const Maps8& maps) {
  __shared__ float firsts[256];
  __shared__ float seconds[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    firsts[i] = maps.exp_avg.values[i];
    seconds[i] = maps.exp_avg_sq.values[i];
  }
  __syncthreads();
  if (!takes_scale(c)) return;
  // The lanes of a warp stay together: they take the same number of blocks.
  const std::int64_t blocks = (numel + kBlock8 - 1) / kBlock8;
  const int lane = threadIdx.x % 32;
  for (std::int64_t block = first_index() / 32; block < blocks; block += index_stride() / 32) {
    const std::int64_t at = block * kBlock8 + lane * kByte;
    const int here = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{kByte}, numel - at)));
    float w[kByte] = {}, m[kByte] = {}, v[kByte] = {}, g[kByte] = {};
    Codes first{}, second{};
    load_codes(states.exp_avg, at, here, first);
    const float scale = states.exp_avg.scales[block];
    if (Formula::kSecond) load_codes(states.exp_avg_sq, at, here, second);
    const float scale_sq = Formula::kSecond ? states.exp_avg_sq.scales[block] : 0.0F;
    load_gradients(gradients, at, here, g);
    masters.load(c, at, here, w);
#pragma unroll
    for (int k = 0; k < kByte; ++k) {
      if (k >= here) continue;
      m[k] = __fmul_rn(firsts[first.at[k]], scale);
      if (Formula::kSecond) v[k] = __fmul_rn(seconds[second.at[k]], scale_sq);
      Formula::update(c, w[k], m[k], v[k], g[k]);
    }
    masters.store(at, here, w);
    __syncwarp();  // the block's scales have been read
    store_state<true>(maps.exp_avg, states.exp_avg, at, here, m, false);
    if (Formula::kSecond)
      store_state<false>(maps.exp_avg_sq, states.exp_avg_sq, at, here, v,
                         maps.keeps_positive != 0);
  }
}

}  // namespace

extern "C" {

#define STRATA_UPDATE8(name, Formula, Narrow, ...)                                              \
  __global__ void strata_##name(void* weights, void* copies, Remainder remainder,               \
                                States8 states, Gradients<Narrow> gradients,                    \
                                std::int64_t numel, UpdateConstants constants, Maps8 maps) {    \
    update8<Formula>(__VA_ARGS__, states, gradients, numel, constants, maps);                   \
  }
#define STRATA_FLOAT_MASTERS(Copy, copies_too) \
  Float32Masters<Copy, copies_too> { static_cast<float*>(weights), static_cast<Copy*>(copies) }
#define STRATA_FORMULA8(name, Formula)                                                           \
  STRATA_UPDATE8(name##_f32, Formula, float, STRATA_FLOAT_MASTERS(float, false))                 \
  STRATA_UPDATE8(name##_f16, Formula, Float16, STRATA_FLOAT_MASTERS(Float16, true))              \
  STRATA_UPDATE8(name##_bf16, Formula, BFloat16, STRATA_FLOAT_MASTERS(BFloat16, true))           \
  STRATA_UPDATE8(name##_remainder, Formula, BFloat16,                                            \
                 JoinedMasters{static_cast<BFloat16*>(copies), remainder})                       \
  STRATA_UPDATE8(name##_rounded, Formula, BFloat16,                                              \
                 RoundedMasters{static_cast<BFloat16*>(copies)})
STRATA_FORMULA8(adam8, Adam)
STRATA_FORMULA8(lion8, Lion)

}  // extern "C"
