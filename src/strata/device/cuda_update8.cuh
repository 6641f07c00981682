// Kernels of the update with states of 8 bits: kernels/states8.h, operation by operation. A warp
// takes a block of 256 elements, a thread eight of them.
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

// The regions of a map: 0 is zero's, then a decade each, then that of 1. A magnitude is at most 1
// but for rounding, so it lies in one of these binades, and no binade has parts of more than two
// regions. The tables are in shared memory; lanes of a warp read words of them without conflicts.
constexpr int kRegions8 = kDecades8 + 2;
constexpr int kBinades8 = 26;
constexpr float kLeast8 =
    5.9604644775390625e-08F;  // 2 ^ -24, of the first binade; below all starts
constexpr int kFirstExponent8 = 127 - 24;

struct Encoder8 {
  struct Binade {
    float start;  // of the region after `region`; infinity: there is none here
    int region;
  };
  struct alignas(16) Region {
    float slope;
    float offset;
    float last;
  };
  Binade binades[kBinades8];
  Region regions[kRegions8];

  // By the threads of a warp.
  __device__ void make(const Map8& map, int lane) {
    if (lane < kBinades8) {
      const float low = __uint_as_float(static_cast<unsigned>(lane + kFirstExponent8) << 23);
      Binade binade{__uint_as_float(0x7F800000U), 0};
#pragma unroll
      for (int i = 0; i <= kDecades8; ++i) {
        if (map.starts[i] < low) binade.region = i + 1;
        if (map.starts[i] >= low && map.starts[i] < 2 * low) binade.start = map.starts[i];
      }
      binades[lane] = binade;
    }
    if (lane < kRegions8) {
      Region region{0.0F, 0.0F, 0.0F};
      if (lane > kDecades8) region.offset = region.last = map.top;
#pragma unroll
      for (int i = 0; i < kDecades8; ++i)
        if (lane == i + 1) region = {map.slopes[i], map.offsets[i], map.lasts[i]};
      regions[lane] = region;
    }
  }

  // number8() of kernels/states8.h; NaN is zero.
  __device__ int number(float magnitude) const {
    magnitude = fminf(fmaxf(magnitude, kLeast8), 2.0F);
    const Binade binade = binades[(__float_as_uint(magnitude) >> 23) - kFirstExponent8];
    const Region region = regions[binade.region + (magnitude > binade.start ? 1 : 0)];
    const float position = fminf(__fmaf_rn(magnitude, region.slope, region.offset), region.last);
    // Rounded down, in the lowest bits of the sum.
    return static_cast<int>(__float_as_uint(__fadd_rz(position, 8388608.0F)) & 0xFFU);
  }
};

// The eight elements of a thread, by accesses of 16 bytes; or, where a block is not `kWhole`, those
// of them that exist, one by one, and the others keep their values.
template <bool kWhole, typename T>
__device__ void load8(const T* from, int here, T (&to)[kByte]) {
  if (kWhole) {
    const Eight<T> all = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
    for (int k = 0; k < kByte; ++k) to[k] = all.at[k];
  } else {
    for (int k = 0; k < kByte; ++k)
      if (k < here) to[k] = from[k];
  }
}
template <bool kWhole, typename T>
__device__ void store8(T* to, int here, const T (&from)[kByte]) {
  if (kWhole) {
    Eight<T> all;
#pragma unroll
    for (int k = 0; k < kByte; ++k) all.at[k] = from[k];
    *reinterpret_cast<Eight<T>*>(to) = all;
  } else {
    for (int k = 0; k < kByte; ++k)
      if (k < here) to[k] = from[k];
  }
}
template <typename T>
__device__ bool aligned8(const T* at) {
  return reinterpret_cast<std::uintptr_t>(at) % alignof(Eight<T>) == 0;
}
__device__ bool aligned8(const Codes8& state) {
  return reinterpret_cast<std::uintptr_t>(state.codes) % alignof(Codes) == 0;
}
template <bool kWhole>
__device__ Codes load_codes(const Codes8& state, std::int64_t at, int here) {
  if (kWhole) return *reinterpret_cast<const Codes*>(state.codes + at);
  Codes codes{};
  for (int k = 0; k < here; ++k) codes.at[k] = state.codes[at + k];
  return codes;
}
template <bool kWhole, typename Narrow>
__device__ void load_gradients(const Gradients<Narrow>& gradients, std::int64_t at, int here,
                               float (&values)[kByte]) {
  if (gradients.narrow == nullptr) return load8<kWhole>(gradients.wide + at, here, values);
  Narrow narrow[kByte] = {};
  load8<kWhole>(gradients.narrow + at, here, narrow);
#pragma unroll
  for (int k = 0; k < kByte; ++k) values[k] = widen(narrow[k]);
}

// The elements of a lane that do not exist have the value zero.
template <bool kWhole, bool kSigned>
__device__ void store_state(const Encoder8& encoder, int zero, const Codes8& state, std::int64_t at,
                            int here, const float (&values)[kByte], bool keeps_positive) {
  float largest = 0.0F;
#pragma unroll
  for (int k = 0; k < kByte; ++k) largest = fmaxf(largest, fabsf(values[k]));
#pragma unroll
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
#pragma unroll
  for (int k = 0; k < kByte; ++k) {
    int number = encoder.number(__fmul_rn(fabsf(values[k]), inverse));
    if (keeps_positive && values[k] > 0.0F) number = max(number, 1);
    if (kSigned) number = values[k] < 0.0F ? zero - min(number, zero) : zero + number;
    codes.at[k] = static_cast<std::uint8_t>(number);
  }
  if (kWhole) {
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

  __device__ bool aligned() const { return aligned8(weights) && (!kCopies || aligned8(copies)); }
  template <bool kWhole>
  __device__ void load(const UpdateConstants& c, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    load8<kWhole>(weights + at, here, masters);
    if (kCopies && c.follows_copies) {
      Copy written[kByte] = {};
      load8<kWhole>(copies + at, here, written);
#pragma unroll
      for (int k = 0; k < kByte; ++k) masters[k] = followed(masters[k], written[k]);
    }
  }
  template <bool kWhole>
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    store8<kWhole>(weights + at, here, masters);
    if (kCopies) {
      Copy written[kByte];
#pragma unroll
      for (int k = 0; k < kByte; ++k) narrow(masters[k], written[k]);
      store8<kWhole>(copies + at, here, written);
    }
  }
};

struct JoinedMasters {
  BFloat16* weights;
  Remainder remainder;

  __device__ bool aligned() const { return aligned8(weights) && aligned8(remainder.low); }
  template <bool kWhole>
  __device__ void load(const UpdateConstants&, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    const unsigned halves_up = kWhole || here > 0 ? remainder.halves_up[at / kByte] : 0U;
    BFloat16 rounded[kByte] = {};
    std::uint16_t low[kByte] = {};
    load8<kWhole>(weights + at, here, rounded);
    load8<kWhole>(remainder.low + at, here, low);
#pragma unroll
    for (int k = 0; k < kByte; ++k)
      masters[k] = join(rounded[k], low[k], (halves_up >> k & 1U) != 0);
  }
  template <bool kWhole>
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    if (!kWhole && here == 0) return;
    const int count = kWhole ? kByte : here;
    const unsigned before = remainder.halves_up[at / kByte];
    unsigned halves_up = before & ~((1U << count) - 1U);  // not ours
    BFloat16 rounded[kByte];
    std::uint16_t low[kByte];
#pragma unroll
    for (int k = 0; k < kByte; ++k)
      if (split(masters[k], rounded[k], low[k]) && k < count) halves_up |= 1U << k;
    store8<kWhole>(weights + at, here, rounded);
    store8<kWhole>(remainder.low + at, here, low);
    if (halves_up != before) remainder.halves_up[at / kByte] = static_cast<std::uint8_t>(halves_up);
  }
};

struct RoundedMasters {
  BFloat16* weights;

  __device__ bool aligned() const { return aligned8(weights); }
  template <bool kWhole>
  __device__ void load(const UpdateConstants&, std::int64_t at, int here,
                       float (&masters)[kByte]) const {
    BFloat16 rounded[kByte] = {};
    load8<kWhole>(weights + at, here, rounded);
#pragma unroll
    for (int k = 0; k < kByte; ++k) masters[k] = widen(rounded[k]);
  }
  template <bool kWhole>
  __device__ void store(std::int64_t at, int here, const float (&masters)[kByte]) const {
    BFloat16 rounded[kByte];
#pragma unroll
    for (int k = 0; k < kByte; ++k) narrow(masters[k], rounded[k]);
    store8<kWhole>(weights + at, here, rounded);
  }
};

// In the shared memory of a thread block.
struct Tables8 {
  float firsts[256];
  float seconds[256];
  Encoder8 first;
  Encoder8 second;
};

// A lane's eight elements of a block, of which the first `here` exist.
template <bool kWhole, typename Formula, typename Masters, typename Narrow>
__device__ void update_block8(const Masters& masters, const States8& states,
                              const Gradients<Narrow>& gradients, std::int64_t block, int here,
                              const UpdateConstants& c, const Tables8& tables, int zero,
                              bool keeps_positive) {
  const std::int64_t at = block * kBlock8 + threadIdx.x % 32 * kByte;
  float w[kByte] = {}, m[kByte] = {}, v[kByte] = {}, g[kByte] = {};
  Codes second{};
  const Codes first = load_codes<kWhole>(states.exp_avg, at, here);
  const float scale = states.exp_avg.scales[block];
  if (Formula::kSecond) second = load_codes<kWhole>(states.exp_avg_sq, at, here);
  const float scale_sq = Formula::kSecond ? states.exp_avg_sq.scales[block] : 0.0F;
  load_gradients<kWhole>(gradients, at, here, g);
  masters.template load<kWhole>(c, at, here, w);
#pragma unroll
  for (int k = 0; k < kByte; ++k) {
    m[k] = __fmul_rn(tables.firsts[first.at[k]], scale);
    if (Formula::kSecond) v[k] = __fmul_rn(tables.seconds[second.at[k]], scale_sq);
  }
  Formula::update(c, w, m, v, g);
#pragma unroll
  for (int k = 0; k < kByte; ++k)
    if (!kWhole && k >= here) m[k] = v[k] = 0.0F;
  masters.template store<kWhole>(at, here, w);
  __syncwarp();  // the block's scales have been read
  store_state<kWhole, true>(tables.first, zero, states.exp_avg, at, here, m, false);
  if (Formula::kSecond)
    store_state<kWhole, false>(tables.second, 0, states.exp_avg_sq, at, here, v, keeps_positive);
}

template <typename Formula, typename Masters, typename Narrow>
__device__ void update8(const Masters& masters, const States8& states, Gradients<Narrow> gradients,
                        std::int64_t numel, UpdateConstants c, const Maps8& maps) {
  __shared__ Tables8 tables;
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    tables.firsts[i] = maps.exp_avg.values[i];
    tables.seconds[i] = maps.exp_avg_sq.values[i];
  }
  const int lane = threadIdx.x % 32;
  if (threadIdx.x / 32 == 0) {
    tables.first.make(maps.exp_avg, lane);
    tables.second.make(maps.exp_avg_sq, lane);
  }
  __syncthreads();
  if (!takes_scale(c)) return;
  const bool aligned = masters.aligned() && gradients.aligned() && aligned8(states.exp_avg) &&
                       aligned8(states.exp_avg_sq);
  const int zero = static_cast<int>(maps.exp_avg.zero);
  const bool keeps_positive = maps.keeps_positive != 0;
  // The lanes of a warp stay together: they take the same number of blocks.
  const std::int64_t blocks = (numel + kBlock8 - 1) / kBlock8;
  for (std::int64_t block = first_index() / 32; block < blocks; block += index_stride() / 32) {
    const std::int64_t left = numel - block * kBlock8 - lane * kByte;
    const int here = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{kByte}, left)));
    if (aligned && (block + 1) * kBlock8 <= numel)
      update_block8<true, Formula>(masters, states, gradients, block, here, c, tables, zero,
                                   keeps_positive);
    else
      update_block8<false, Formula>(masters, states, gradients, block, here, c, tables, zero,
                                    keeps_positive);
  }
}

}  // namespace

extern "C" {

#define STRATA_UPDATE8(name, Formula, Narrow, ...)                                                \
  __global__ void strata_##name(void* weights, void* copies, Remainder remainder, States8 states, \
                                Gradients<Narrow> gradients, std::int64_t numel,                  \
                                UpdateConstants constants, Maps8 maps) {                          \
    update8<Formula>(__VA_ARGS__, states, gradients, numel, constants, maps);                     \
  }
#define STRATA_FLOAT_MASTERS(Copy, copies_too)               \
  Float32Masters<Copy, copies_too> {                         \
    static_cast<float*>(weights), static_cast<Copy*>(copies) \
  }
#define STRATA_FORMULA8(name, Formula)                                                 \
  STRATA_UPDATE8(name##_f32, Formula, float, STRATA_FLOAT_MASTERS(float, false))       \
  STRATA_UPDATE8(name##_f16, Formula, Float16, STRATA_FLOAT_MASTERS(Float16, true))    \
  STRATA_UPDATE8(name##_bf16, Formula, BFloat16, STRATA_FLOAT_MASTERS(BFloat16, true)) \
  STRATA_UPDATE8(name##_remainder, Formula, BFloat16,                                  \
                 JoinedMasters{static_cast<BFloat16*>(copies), remainder})             \
  STRATA_UPDATE8(name##_rounded, Formula, BFloat16, RoundedMasters{static_cast<BFloat16*>(copies)})
STRATA_FORMULA8(adam8, Adam)
STRATA_FORMULA8(lion8, Lion)

}  // extern "C"
