// This rank's record of the gradients of one step, beside their values: which parameters got one,
// which one was missing when its unit was reduced, and which ones a script has dropped since.
//
// Each rank holds a part of every reduced gradient, so ranks must drop the same ones: dropped() is
// a number by which they compare. A gradient that was not reduced yet is this rank's own, and it
// may drop that alone.
//
// Threads: one thread at a time. Pure bookkeeping. Errors: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "strata/engine/unit/unit.h"

namespace strata::engine {

class GradientRecord {
 public:
  explicit GradientRecord(std::span<const Unit> units) {
    for (const Unit& unit : units) {
      for (const int param : unit.spec.params)
        got_.resize(std::max(got_.size(), static_cast<std::size_t>(param) + 1));
    }
  }

  void begin_pass() { collects_ = true; }
  void record_reduced_pass() { ++reduced_passes_; }
  void record_gradient(int param, bool got = true) { got_[static_cast<std::size_t>(param)] = got; }
  void record_unused(int param) {
    if (unused_ < 0) unused_ = param;
  }
  void record_all_dropped() {
    clear();
    dropped_ = 0;
    note(1);
  }
  void record_dropped(int param, bool came) {
    record_gradient(param, came);
    note(static_cast<std::uint32_t>(param) + 2);
  }
  // The step is over.
  void forget() {
    clear();
    collects_ = false;
    reduced_passes_ = 0;
    dropped_ = 0;
  }

  // Whether a backward pass has begun since the last forget(), whatever was dropped of it.
  bool collects() const { return collects_; }
  bool got(int param) const { return got_[static_cast<std::size_t>(param)]; }
  // A parameter whose gradient was missing on this rank when its unit was reduced; -1: none.
  int unused() const { return unused_; }
  // 0: nothing that was reduced; at most kDroppedMost.
  std::uint32_t dropped() const { return dropped_; }
  static constexpr std::uint32_t kDroppedMost = (1U << 20) - 1;

 private:
  void clear() {
    std::fill(got_.begin(), got_.end(), false);
    unused_ = -1;
  }
  // Sums, so that the order of what is dropped between two passes does not matter.
  void note(std::uint32_t what) {
    constexpr std::uint32_t kOdd = 0x9E3779B1U;
    if (reduced_passes_ == 0) return;
    const std::uint32_t number = (what * kOdd >> 12U) + (reduced_passes_ * kOdd >> 16U);
    dropped_ = (dropped_ + std::max(number & kDroppedMost, 1U)) & kDroppedMost;
  }

  std::vector<bool> got_;  // by parameter
  int unused_ = -1;
  bool collects_ = false;
  std::uint32_t reduced_passes_ = 0;  // the same on every rank
  std::uint32_t dropped_ = 0;
};

}  // namespace strata::engine
