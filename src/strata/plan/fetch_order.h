// The order in which units are used, learned from the last pass and used to look ahead: which unit
// comes next, and how far away is the next use of this one. Before the first pass it is the order
// of registration forwards, then backwards. A use that was not foreseen costs a late fetch, nothing
// else. Threads: one thread at a time. Pure bookkeeping, no I/O.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace strata::plan {

class FetchOrder {
 public:
  explicit FetchOrder(int unit_count);

  // Starts a pass: what was recorded since the last start becomes the expectation (if anything
  // was).
  void start_pass();

  // Notes the use of `unit` and moves the position behind it. A unit that is not next is searched
  // ahead; if it is not expected any more the position stays.
  void note_use(int unit);

  // The units expected next, nearest first (a unit may occur twice).
  std::span<const int> upcoming() const;

  // How many uses lie before the next expected use of `unit`; a large number when none is expected.
  std::int64_t distance(int unit) const;

  // The order of first uses in the current pass.
  const std::vector<int>& first_uses() const { return first_uses_; }

  // Running hash of the pass's uses, for comparing ranks.
  std::uint64_t hash() const { return hash_; }

 private:
  std::vector<int> expected_;
  std::vector<int> recorded_;
  std::vector<int> first_uses_;
  std::vector<bool> used_;
  std::size_t position_ = 0;  // index into expected_ of what comes next
  std::uint64_t hash_ = 0;
};

}  // namespace strata::plan
