// The differences of two checkpoints of either kind, as `strata diff` shows them: names, shapes,
// dtypes, and by how much values do. Where one is a training checkpoint and the other is not, the
// fp32 masters of the one are rounded to the dtype that the other has, which says nothing of
// dtypes then: so a checkpoint equals what was consolidated from it.
//
// Threads: one, beside those of the IoEngine. Memory: a ring, and two pieces in fp64. Errors: of
// TensorSource; UsageError where optimizer states are asked for that one of them cannot have.
#pragma once

#include <cstddef>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/cli/console.h"
#include "strata/cli/tensor_source.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ComparisonOptions {
  std::size_t top = 20;                       // the most tensors that are listed
  bool kinds = false;                         // also what optimizers keep
  checkpoint::RingOptions ring = {8, 8_MiB};  // half of a buffer is for each of the two
};

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

// A tensor of both.
struct ComparedTensor {
  const SourceTensor* a = nullptr;
  const SourceTensor* b = nullptr;
  bool same_shape = true;
  bool same_dtype = true;
  bool compared = true;  // false: shapes or dtypes do not allow it
  ElementDifference difference;

  bool equal() const { return same_shape && same_dtype && difference.differing.value == 0; }
};

struct Comparison {
  std::string a;
  std::string b;
  std::vector<std::string> only_a;
  std::vector<std::string> only_b;
  std::vector<ComparedTensor> tensors;  // those whose values differ most first
  std::size_t top = 20;

  bool equal() const;
};

// Borrows the sources.
Comparison compare(const TensorSource& a, const TensorSource& b, const ComparisonOptions& options,
                   io::IoEngine& io, const std::shared_ptr<memory::Ledger>& ledger,
                   Console& console);

std::string text_of(const Comparison& comparison);
nlohmann::json json_of(const Comparison& comparison);

}  // namespace strata::cli
