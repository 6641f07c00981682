// The differences of two checkpoints of either kind, as `strata diff` shows them: names, shapes,
// dtypes, and by how much values do. Where one is a training checkpoint and the other is not, the
// fp32 masters of the one are rounded to the dtype that the other has, which says nothing of
// dtypes then: so a checkpoint equals what was consolidated from it.
//
// Threads: one, beside those of the IoEngine. Memory: a ring, and two pieces in fp64. Errors: of
// TensorSource; UsageError where optimizer states are asked for that one of them cannot have.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "strata/checkpoint/ring.h"
#include "strata/cli/element_difference.h"
#include "strata/cli/progress.h"
#include "strata/cli/tensor_source.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ComparisonOptions {
  std::size_t top = 20;                       // the most tensors that are listed
  bool kinds = false;                         // also what optimizers keep
  checkpoint::RingOptions ring = {8, 8_MiB};  // half of a buffer is for each of the two
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
