// Many small counts in few doubles, so that one sum of doubles over all ranks adds up each of them,
// exactly. Pure arithmetic, immutable.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace strata::engine {

class PackedCounts {
 public:
  // `most`: no count exceeds it in the sum; from 1.
  PackedCounts(std::size_t counts, int most);

  // 1 each, but 0 for `absent`.
  std::vector<double> ones_without(std::span<const int> absent) const;
  // The counts that are 0 in the sum, in ascending order.
  std::vector<int> zeroes(std::span<const double> sum) const;

 private:
  std::size_t counts_;
  std::size_t bits_;        // of a count
  std::size_t per_double_;  // counts
};

}  // namespace strata::engine
