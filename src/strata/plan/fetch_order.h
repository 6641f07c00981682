// The order in which units are used, learned from the last pass and used to look ahead: which unit
// comes next, and how far away is the next use of this one. Before the first pass it is the order
// of registration forwards, then backwards, unless expect() gave another. A use that was not
// foreseen costs a late fetch, nothing else: the position is found again as soon as two uses in a
// row are known from the last pass, so that passes of several kinds (evaluation between steps) do
// not upset each other for long. Threads: one thread at a time. Memory: bounded, however long a
// pass is; of a very long one the end is kept. Pure bookkeeping, no I/O.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace strata::plan {

class FetchOrder {
 public:
  explicit FetchOrder(int unit_count);

  // Replaces what is expected of the pass: the units in the order of their uses.
  void expect(std::vector<int> uses);

  // first_uses() holds this unit `times` times, each after a use of another unit.
  void expect_first_uses(int unit, int times) {
    first_uses_of_[static_cast<std::size_t>(unit)] = times;
  }

  // Starts a pass: what was recorded since the last start becomes the expectation (if anything
  // was).
  void start_pass();

  // Notes the use of `unit` and moves the position behind it. Where `unit` is not what comes next
  // the position is looked for: behind a use of the same two units in a row, else behind the next
  // use of `unit`. If there is none either, it stays.
  void note_use(int unit);

  // Notes for first_uses() alone that here is a use of `unit` which this rank could leave out.
  void note_left_out(int unit);

  // The units expected next, nearest first (a unit may occur twice).
  std::span<const int> upcoming() const;

  // The expected uses of the pass that start_pass() would start now.
  const std::vector<int>& next_pass() const { return recorded_.empty() ? expected_ : recorded_; }

  // How many uses lie before the next expected use of `unit`; a large number when none is expected.
  // Logarithmic in the uses of that unit.
  std::int64_t distance(int unit) const;

  // The order of first uses in the current pass.
  const std::vector<int>& first_uses() const { return first_uses_; }

 private:
  void find_position(int previous, int unit);
  std::span<const std::size_t> places(int unit) const {
    return places_[static_cast<std::size_t>(unit)];
  }

  std::vector<int> expected_;
  std::vector<std::vector<std::size_t>> places_;  // by unit: its indices in expected_, ascending
  std::vector<int> recorded_;
  std::vector<int> first_uses_;
  std::vector<int> first_uses_of_;  // by unit: how many are kept
  std::vector<int> used_;           // by unit: uses in this pass, up to that many
  std::size_t position_ = 0;        // index into expected_ of what comes next
};

}  // namespace strata::plan
