// Which parts of [0, size) have been claimed, when nothing may be claimed twice and in the end
// everything must have been. Neighbouring parts are merged, so work in order costs constant memory.
// Threads: one thread. Units: whatever the caller counts (bytes of a file, elements of a
// parameter).
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace strata::format {

struct Span1d {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const Span1d&) const = default;
};

class RangeCover {
 public:
  explicit RangeCover(std::int64_t size) : size_(size) {}

  // Claims the span (begin <= end, within the size). If a part of it was claimed before, claims
  // nothing and returns the first such part.
  std::optional<Span1d> claim(Span1d span);
  // The first part that was not claimed.
  std::optional<Span1d> first_gap() const;
  bool complete() const { return claimed_ == size_; }
  std::int64_t claimed() const { return claimed_; }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  std::int64_t claimed_ = 0;
  std::map<std::int64_t, std::int64_t> parts_;  // begin to end; never touching
};

}  // namespace strata::format
