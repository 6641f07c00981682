// What the kernels of cuda_kernels.cu are made of: 16-bit numbers with the host's rounding
// (kernels/float16.h), packs that one thread moves at once, and the loop over the elements of
// arrays. Device code; included by that file alone.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

__device__ float widen(double value) { return static_cast<float>(value); }
__device__ float widen(float value) { return value; }
__device__ float widen(BFloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}
__device__ float widen(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

__device__ void narrow(float value, double& result) { result = static_cast<double>(value); }
__device__ void narrow(float value, float& result) { result = value; }
__device__ void narrow(float value, BFloat16& result) {
  const std::uint32_t bits = __float_as_uint(value);
  const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const std::uint32_t rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  result.bits = static_cast<std::uint16_t>((nan ? bits | 0x00400000U : rounded) >> 16);
}
__device__ void narrow(float value, Float16& result) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    result.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | 0x7E00U |
                                             ((bits >> 13) & 0x3FFU));
  } else {
    result.bits = __half_as_ushort(__float2half_rn(value));
  }
}

// Elements that one thread takes at once; all arrays begin at multiples of 16 bytes.
constexpr int kPack = 4;

template <typename T>
struct alignas(sizeof(T) * kPack < 16 ? sizeof(T) * kPack : 16) Pack {
  T at[kPack];
};

template <typename T>
__device__ bool packed(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignof(Pack<T>) == 0;
}

__device__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::int64_t index_stride() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

// Calls each_pack(p) for every whole pack where `packs` allows, each_one(i) for the other elements.
template <typename EachPack, typename EachOne>
__device__ void for_elements(std::int64_t numel, bool packs, EachPack each_pack, EachOne each_one) {
  const std::int64_t whole = packs ? numel / kPack : 0;
  for (std::int64_t p = first_index(); p < whole; p += index_stride()) each_pack(p);
  for (std::int64_t i = whole * kPack + first_index(); i < numel; i += index_stride()) each_one(i);
}

}  // namespace
