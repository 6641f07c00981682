#include "strata/plan/fetch_order.h"

#include <algorithm>
#include <limits>

namespace strata::plan {
namespace {

constexpr std::uint64_t kHashFactor = 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio, odd

}  // namespace

FetchOrder::FetchOrder(int unit_count) : used_(static_cast<std::size_t>(unit_count)) {
  for (int i = 0; i < unit_count; ++i) expected_.push_back(i);
  for (int i = unit_count; i-- > 0;) expected_.push_back(i);
}

void FetchOrder::start_pass() {
  if (!recorded_.empty()) expected_ = std::move(recorded_);
  recorded_.clear();
  first_uses_.clear();
  std::fill(used_.begin(), used_.end(), false);
  position_ = 0;
  hash_ = 0;
}

void FetchOrder::note_use(int unit) {
  if (!recorded_.empty() && recorded_.back() == unit) return;  // a unit in use, used again
  recorded_.push_back(unit);
  hash_ ^= static_cast<std::uint64_t>(unit) + 1;
  hash_ *= kHashFactor;
  if (!used_[static_cast<std::size_t>(unit)]) {
    used_[static_cast<std::size_t>(unit)] = true;
    first_uses_.push_back(unit);
  }
  const auto from = expected_.begin() + static_cast<std::ptrdiff_t>(position_);
  const auto found = std::find(from, expected_.end(), unit);
  if (found != expected_.end()) position_ = static_cast<std::size_t>(found - expected_.begin()) + 1;
}

std::span<const int> FetchOrder::upcoming() const {
  return std::span<const int>(expected_).subspan(position_);
}

std::int64_t FetchOrder::distance(int unit) const {
  const auto from = expected_.begin() + static_cast<std::ptrdiff_t>(position_);
  const auto found = std::find(from, expected_.end(), unit);
  return found == expected_.end() ? std::numeric_limits<std::int64_t>::max() : found - from;
}

}  // namespace strata::plan
