// The order in which units are used, learned from the last pass. It predicts which unit comes next,
// and how far away the next use of a unit is. Before the first pass it is the order of registration
// forwards, then backwards, unless expect() gave another. A use that was not predicted costs only a
// late gather. The position is found again as soon as the last pass knows two uses in a row, so
// passes of several kinds (evaluation between steps) do not upset each other for long. Threads: one
// thread at a time. Memory: bounded for passes of any length; of a very long pass the end is kept.
// Pure bookkeeping, no I/O.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace strata::plan {

class FetchOrder {
 public:
  explicit FetchOrder(int unit_count);

  // Replaces the prediction for the pass: the units in the order of their uses.
  void expect(std::vector<int> uses);

  // first_uses() holds this unit `times` times, each after a use of another unit.
  void expect_first_uses(int unit, int times) {
    first_uses_of_[static_cast<std::size_t>(unit)] = times;
  }

  // Starts a pass: the uses since the last start become the prediction, if there were any.
  void start_pass();

  // Records the use of `unit` and moves the position behind it. If another unit was predicted, the
  // position is searched: behind a use of the same two units in a row, or else behind the next use
  // of `unit`. If there is none either, it stays.
  void record_use(int unit);

  // Records, for first_uses() alone, a use of `unit` that this rank could leave out.
  void record_skipped(int unit);

  // The units expected next, nearest first (a unit may occur twice).
  std::span<const int> upcoming() const;

  // The expected uses of the pass that start_pass() would start now.
  const std::vector<int>& next_pass() const { return recorded_.empty() ? expected_ : recorded_; }

  // The number of uses before the next predicted use of `unit`; a large number if none is
  // predicted. Logarithmic in the uses of that unit.
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
