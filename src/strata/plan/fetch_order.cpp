#include "strata/plan/fetch_order.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace strata::plan {
namespace {

// Uses of one pass that are remembered: hours of evaluation between two steps are one pass, too.
constexpr std::size_t kRecordedMax = std::size_t{1} << 16;

}  // namespace

FetchOrder::FetchOrder(int unit_count)
    : places_(static_cast<std::size_t>(unit_count)),
      first_uses_of_(static_cast<std::size_t>(unit_count), 1),
      used_(static_cast<std::size_t>(unit_count)) {
  std::vector<int> uses;
  for (int i = 0; i < unit_count; ++i) uses.push_back(i);
  for (int i = unit_count; i-- > 0;) uses.push_back(i);
  expect(std::move(uses));
}

void FetchOrder::expect(std::vector<int> uses) {
  expected_ = std::move(uses);
  for (std::vector<std::size_t>& places : places_) places.clear();
  for (std::size_t i = 0; i < expected_.size(); ++i)
    places_[static_cast<std::size_t>(expected_[i])].push_back(i);
}

void FetchOrder::start_pass() {
  if (!recorded_.empty() && recorded_ != expected_) expect(std::move(recorded_));
  recorded_.clear();
  first_uses_.clear();
  std::fill(used_.begin(), used_.end(), 0);
  position_ = 0;
}

void FetchOrder::record_use(int unit) {
  const int previous = recorded_.empty() ? -1 : recorded_.back();
  if (previous == unit) return;  // a unit in use, used again
  if (recorded_.size() == kRecordedMax)
    recorded_.erase(recorded_.begin(), recorded_.begin() + kRecordedMax / 2);
  recorded_.push_back(unit);
  record_skipped(unit);
  if (position_ < expected_.size() && expected_[position_] == unit)
    ++position_;
  else
    find_position(previous, unit);
}

void FetchOrder::record_skipped(int unit) {
  const auto index = static_cast<std::size_t>(unit);
  if (used_[index] == first_uses_of_[index]) return;
  ++used_[index];
  first_uses_.push_back(unit);
}

void FetchOrder::find_position(int previous, int unit) {
  const std::span<const std::size_t> all = places(unit);
  const auto ahead = std::lower_bound(all.begin(), all.end(), position_);
  const auto after_previous = [&](std::size_t place) {
    return place > 0 && expected_[place - 1] == previous;
  };
  auto found = std::find_if(ahead, all.end(), after_previous);
  if (found == all.end()) {
    const auto behind = std::find_if(all.begin(), ahead, after_previous);
    found = behind == ahead ? ahead : behind;
  }
  if (found != all.end()) position_ = *found + 1;
}

std::span<const int> FetchOrder::upcoming() const {
  return std::span<const int>(expected_).subspan(position_);
}

std::int64_t FetchOrder::distance(int unit) const {
  const std::span<const std::size_t> all = places(unit);
  const auto next = std::lower_bound(all.begin(), all.end(), position_);
  if (next == all.end()) return std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(*next - position_);
}

}  // namespace strata::plan
