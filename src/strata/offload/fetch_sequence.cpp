#include "strata/offload/fetch_sequence.h"

#include <algorithm>

namespace strata::offload {
namespace {

constexpr std::size_t kPartsMost = 1 << 20;
constexpr std::int64_t kForgets = 8;  // the part of a round's length that each shorter one takes

std::uint64_t key_of(int before, int last) {
  return (std::uint64_t{static_cast<std::uint32_t>(before)} << 32U) |
         static_cast<std::uint32_t>(last);
}

}  // namespace

std::vector<Part> FetchSequence::note(const Part& part) {
  std::vector<Part> dropped;
  const int index = index_of(part);
  if (index < 0) {  // too many: all over again
    for (const int expected : expected_)
      dropped.push_back(parts_[static_cast<std::size_t>(expected)]);
    *this = FetchSequence();
    return dropped;
  }
  const auto found = std::ranges::find(expected_, index);
  for (auto it = expected_.begin(); it != found; ++it)
    dropped.push_back(parts_[static_cast<std::size_t>(*it)]);
  expected_.erase(expected_.begin(), found == expected_.end() ? found : found + 1);
  learn(index);
  return dropped;
}

int FetchSequence::index_of(const Part& part) {
  const auto found = indices_.find(part);
  if (found != indices_.end()) return found->second;
  if (parts_.size() == kPartsMost) return -1;
  const int index = static_cast<int>(parts_.size());
  indices_.emplace(part, index);
  parts_.push_back(part);
  by_one_.push_back(-1);
  noted_.push_back(0);
  return index;
}

void FetchSequence::learn(int index) {
  if (current_.last >= 0) {
    by_one_[static_cast<std::size_t>(current_.last)] = index;
    // Random fetches never repeat a pair, so their pairs are worth no memory.
    if (by_two_.size() >= 2 * kPartsMost) by_two_.clear();
    if (current_.before >= 0) by_two_[key_of(current_.before, current_.last)] = index;
  }
  current_ = {current_.last, index};
  std::int64_t& noted = noted_[static_cast<std::size_t>(index)];
  ++now_;
  if (noted > 0) round_ = std::max(now_ - noted, round_ - round_ / kForgets);
  noted = now_;
}

FetchSequence::Pair FetchSequence::end() const {
  if (expected_.empty()) return current_;
  const int before = expected_.size() > 1 ? *(expected_.end() - 2) : current_.last;
  return {before, expected_.back()};
}

int FetchSequence::next_of(Pair at) const {
  if (at.last < 0) return -1;
  const auto found = by_two_.find(key_of(at.before, at.last));
  return found != by_two_.end() ? found->second : by_one_[static_cast<std::size_t>(at.last)];
}

std::optional<Part> FetchSequence::following() const {
  const int next = next_of(end());
  if (next < 0) return std::nullopt;
  return parts_[static_cast<std::size_t>(next)];
}

void FetchSequence::expect_following() {
  if (const int next = next_of(end()); next >= 0) expected_.push_back(next);
}

}  // namespace strata::offload
