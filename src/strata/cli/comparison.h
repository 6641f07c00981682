// The differences of two checkpoints of either kind, as `strata diff` shows them: names, shapes,
// dtypes, and by how much values do. Where one is a training checkpoint and the other is not, the
// fp32 masters of the one are rounded to the dtype that the other has, which says nothing of
// dtypes then: so a checkpoint equals what was consolidated from it.
//
// Threads: one, beside those that read. Memory: a ring, and two pieces in fp64. Errors: of
// TensorSource; UsageError where optimizer states are asked for that one of them cannot have.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/cli/console.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ComparisonRequest {
  std::string a;
  std::string b;
  std::size_t top = 20;  // the most tensors that are listed
  bool kinds = false;    // also what optimizers keep
};

Report compare(const ComparisonRequest& request, const std::shared_ptr<memory::Ledger>& ledger,
               Console& console);

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
