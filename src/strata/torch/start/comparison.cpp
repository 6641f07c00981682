#include "strata/torch/start/comparison.h"

#include <algorithm>
#include <string_view>

#include "strata/base/error.h"

namespace strata::torch {

Comparison::Comparison(comm::Collectives& collectives,
                       const std::vector<ModelParameter>& parameters)
    : collectives_(collectives) {
  first_.push_back(0);
  for (const ModelParameter& parameter : parameters) {
    const Bytes bytes(parameter.variable.nbytes());
    first_.push_back(first_.back() + (parameter.has_own_values() ? block_count(bytes, kBlock) : 0));
  }
  differs_.resize(first_.back());
  if (!wanted()) return;
  found_.resize(first_.back() * kFingerprintBytes);
  given_.assign(first_.back(), '0');
}

std::span<char> Comparison::place_for(int param, std::size_t first, std::size_t count) {
  STRATA_ASSERT(wanted() && first_block(param) + first + count <= first_block(param + 1));
  const std::size_t begin = first_block(param) + first;
  std::fill_n(given_.begin() + static_cast<std::ptrdiff_t>(begin), count, '1');
  return std::span(found_).subspan(begin * kFingerprintBytes, count * kFingerprintBytes);
}

void Comparison::exchange() {
  if (!wanted()) return;
  const std::vector<std::string> all = collectives_.all_gather_text(found_ + given_);
  for (std::size_t i = 0; i < differs_.size(); ++i) {
    const auto at = [&](std::size_t rank) {
      return std::string_view(all[rank]).substr(i * kFingerprintBytes, kFingerprintBytes);
    };
    const auto given = [&](std::size_t rank) { return all[rank][found_.size() + i] == '1'; };
    for (std::size_t r = 1; r < all.size(); ++r)
      differs_[i] = differs_[i] || (given(0) && given(r) && at(r) != at(0));
    any_ = any_ || differs_[i];
  }
}

std::vector<Comparison::Run> Comparison::runs(int param, std::size_t most) const {
  std::vector<Run> runs;
  const std::size_t first = first_block(param);
  for (std::size_t i = first; i < first_block(param + 1); ++i) {
    const bool differs = differs_[i];
    const bool goes_on = !runs.empty() && runs.back().differs == differs &&
                         runs.back().end - runs.back().begin < most;
    if (!goes_on) runs.push_back({i - first, i - first, differs});
    ++runs.back().end;
  }
  return runs;
}

}  // namespace strata::torch
