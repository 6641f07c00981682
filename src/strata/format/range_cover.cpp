#include "strata/format/range_cover.h"

#include <algorithm>
#include <iterator>

#include "strata/base/error.h"

namespace strata::format {

std::optional<Span1d> RangeCover::claim(Span1d span) {
  STRATA_ASSERT(0 <= span.begin && span.begin <= span.end && span.end <= size_);
  if (span.begin == span.end) return std::nullopt;
  auto after = parts_.upper_bound(span.begin);
  if (after != parts_.begin()) {
    const auto before = std::prev(after);
    if (before->second > span.begin) {
      return Span1d{span.begin, std::min(before->second, span.end)};
    }
  }
  if (after != parts_.end() && after->first < span.end) {
    return Span1d{after->first, std::min(after->second, span.end)};
  }
  claimed_ += span.end - span.begin;
  if (after != parts_.end() && after->first == span.end) {
    span.end = after->second;
    after = parts_.erase(after);
  }
  if (after != parts_.begin() && std::prev(after)->second == span.begin) {
    std::prev(after)->second = span.end;
  } else {
    parts_.emplace_hint(after, span.begin, span.end);
  }
  return std::nullopt;
}

std::optional<Span1d> RangeCover::first_gap() const {
  if (complete()) return std::nullopt;
  const auto first = parts_.begin();
  if (first == parts_.end()) return Span1d{0, size_};
  if (first->first > 0) return Span1d{0, first->first};
  const auto second = std::next(first);
  return Span1d{first->second, second == parts_.end() ? size_ : second->first};
}

}  // namespace strata::format
