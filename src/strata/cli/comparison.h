// How far the elements of two tensors are apart, as `strata diff` measures it. Values; a meter is
// of one thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata::cli {

// How far the elements of two tensors are apart. A NaN equals a NaN, and is infinitely far from a
// number. Numbers are compared as numbers: floating ones in fp64, which holds each of them exactly;
// integers by themselves. Elements of other types (float8) are compared by their bytes alone.
struct ElementDifference {
  Numel differing;
  double largest = 0;  // infinite: NaN against a number
  Numel at;            // the first element that differs that much
  double a = 0;
  double b = 0;
  bool has_values = true;  // false: float8; `largest`, `a` and `b` say nothing
};

// Whether elements of these dtypes can be compared: two floating ones, two integers, or the same.
bool comparable(DType a, DType b);

// Holds two pieces in fp64.
class DifferenceMeter {
 public:
  // `rounded_to`: floating values are rounded to it before they are compared.
  void add(std::span<const std::byte> a, DType a_dtype, std::span<const std::byte> b, DType b_dtype,
           std::optional<DType> rounded_to, Numel first, ElementDifference& difference);

 private:
  std::vector<std::byte> rounded_;
  std::vector<double> a_;
  std::vector<double> b_;
};

}  // namespace strata::cli
