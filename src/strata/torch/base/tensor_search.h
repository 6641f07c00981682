// Finds the tensors in the arguments and results of forward: tensors, and optionals, pairs, tuples,
// vectors, arrays and maps of them. Values of other types hold none. Pure.
#pragma once

#include <ATen/core/Tensor.h>

#include <iterator>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace strata::torch {

namespace detail {

template <typename T, typename = void>
struct IsRange : std::false_type {};
template <typename T>
struct IsRange<T, std::void_t<decltype(std::begin(std::declval<T&>())),
                              decltype(std::end(std::declval<T&>()))>> : std::true_type {};

template <typename T, typename = void>
struct IsTuple : std::false_type {};
template <typename T>
struct IsTuple<T, std::void_t<decltype(std::tuple_size<T>::value)>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

}  // namespace detail

template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_convertible_v<const T&, const at::TensorBase&>) {
    tensors.emplace_back(value);
  } else if constexpr (detail::IsOptional<T>::value) {
    if (value.has_value()) collect_tensors(*value, tensors);
  } else if constexpr (detail::IsRange<const T>::value) {
    // A range of itself (std::filesystem::path) would not end.
    if constexpr (!std::is_same_v<std::decay_t<decltype(*std::begin(value))>, T>) {
      for (const auto& element : value) collect_tensors(element, tensors);
    }
  } else if constexpr (detail::IsTuple<T>::value) {
    std::apply([&](const auto&... elements) { (collect_tensors(elements, tensors), ...); }, value);
  }
}

}  // namespace strata::torch
