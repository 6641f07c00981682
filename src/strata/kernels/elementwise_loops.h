// The scalar loops behind elementwise.h, over storage types instead of DType values: references of
// the vectorized loops and their last few elements. Private to this layer.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include "strata/base/dtype.h"
#include "strata/kernels/float16.h"

namespace strata::kernels {

template <typename Storage>
Storage element_at(const std::byte* array, std::size_t i) {
  Storage value;
  std::memcpy(&value, array + i * sizeof(Storage), sizeof value);
  return value;
}

template <typename Storage>
float load_element(const std::byte* array, std::size_t i) {
  const auto value = element_at<Storage>(array, i);
  if constexpr (std::is_arithmetic_v<Storage>)
    return static_cast<float>(value);
  else
    return to_float(value);
}

template <typename Storage>
void store_element(std::byte* array, std::size_t i, float value) {
  Storage stored;
  if constexpr (std::is_same_v<Storage, BFloat16>)
    stored = bfloat16_from(value);
  else if constexpr (std::is_same_v<Storage, Float16>)
    stored = float16_from(value);
  else
    stored = static_cast<Storage>(value);
  std::memcpy(array + i * sizeof(Storage), &stored, sizeof stored);
}

template <typename Target, typename Source>
void cast_scalars(std::byte* target, const std::byte* source, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i)
    store_element<Target>(target, i, load_element<Source>(source, i));
}

template <typename Target, typename Source>
void accumulate_scalars(std::byte* target, const std::byte* source, std::size_t begin,
                        std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    const float sum = load_element<Target>(target, i) + load_element<Source>(source, i);
    store_element<Target>(target, i, sum);
  }
}

// The work of sum_in_order on elements [begin, end) of all its arrays.
struct SumTask {
  float* target;
  std::span<const std::byte* const> sources;
  float scale;
  bool accumulate;
};

template <typename Source>
void sum_scalars(const SumTask& task, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    float sum = load_element<Source>(task.sources[0], i);
    for (const std::byte* source : task.sources.subspan(1)) sum += load_element<Source>(source, i);
    sum *= task.scale;
    task.target[i] = task.accumulate ? task.target[i] + sum : sum;
  }
}

template <typename Source>
void adopt_scalars(float* masters, const std::byte* weights, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    std::byte rounded[sizeof(Source)];
    store_element<Source>(rounded, 0, masters[i]);
    const float written = load_element<Source>(weights, i);
    if (load_element<Source>(rounded, 0) != written) masters[i] = written;
  }
}

// Calls `use` with a value of the storage type; false when there is none for `dtype`.
template <typename Use>
bool with_storage(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::kFloat32:
      use(float{});
      return true;
    case DType::kBFloat16:
      use(BFloat16{});
      return true;
    case DType::kFloat16:
      use(Float16{});
      return true;
    default:
      return false;
  }
}

template <typename Use>
bool with_wide_storage(DType dtype, Use&& use) {
  if (dtype != DType::kFloat64) return with_storage(dtype, use);
  use(double{});
  return true;
}

// Throw UsageError, naming the operation and the types that it has.
void check_cast(DType target, DType source);
void check_accumulate(DType target, DType source);
void check_sum(std::size_t sources, DType dtype);

}  // namespace strata::kernels
