#include "strata/engine/reduce/packed_counts.h"

#include <bit>
#include <cstdint>
#include <limits>

#include "strata/base/error.h"

namespace strata::engine {

PackedCounts::PackedCounts(std::size_t counts, int most)
    : counts_(counts),
      bits_(static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(most)))),
      // A double holds whole numbers of up to this many bits exactly.
      per_double_(static_cast<std::size_t>(std::numeric_limits<double>::digits) / bits_) {
  STRATA_ASSERT(most >= 1);
}

std::vector<double> PackedCounts::ones_without(std::span<const int> absent) const {
  std::vector<bool> one(counts_, true);
  for (const int index : absent) one[static_cast<std::size_t>(index)] = false;
  std::vector<std::uint64_t> words((counts_ + per_double_ - 1) / per_double_);
  for (std::size_t i = 0; i < counts_; ++i) {
    if (one[i]) words[i / per_double_] |= std::uint64_t{1} << (i % per_double_ * bits_);
  }
  return {words.begin(), words.end()};
}

std::vector<int> PackedCounts::zeroes(std::span<const double> sum) const {
  const std::uint64_t mask = (std::uint64_t{1} << bits_) - 1;
  std::vector<int> result;
  for (std::size_t i = 0; i < counts_; ++i) {
    const auto word = static_cast<std::uint64_t>(sum[i / per_double_]);
    if ((word >> (i % per_double_ * bits_) & mask) == 0) result.push_back(static_cast<int>(i));
  }
  return result;
}

}  // namespace strata::engine
