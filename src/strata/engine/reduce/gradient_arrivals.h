// The gradients of a backward pass that have come, and the unit that is reduced next.
//
// A unit is complete when all its expected gradients have come. All ranks reduce units in one
// order, each unit as soon as it and those before it are complete, so that the collectives match,
// whatever each rank's autograd did. The first pass expects one gradient of each parameter and
// reduces in the reverse of forward's order. Later passes expect the gradients that came in it, in
// their order on rank 0. If more than `most_waiting` bytes of complete units wait for a unit, it is
// reduced without the missing gradients.
//
// A tile that several modules use, as a head that is tied to its embedding, has several turns in
// that order, one for each gradient. Otherwise all tiles would wait for its last gradient.
//
// Threads: one thread at a time. Ownership: borrows the units and the collectives. Errors:
// CommError from begin_pass() and end_pass(), which are collectives once each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

// This rank's record of the gradients of one step: which parameters got one, which one was missing
// when its unit was reduced, and which ones a script has dropped since. Each rank holds a part of
// every reduced gradient, so ranks must drop the same ones: they compare dropped(). A gradient that
// was not reduced yet is this rank's own. Pure bookkeeping, without errors.
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
  void record_gradient(int param, bool got = true) { nth(got_, param) = got; }
  void record_unused(int param) {
    if (unused_ < 0) unused_ = param;
  }
  void record_all_dropped() {
    clear();
    dropped_ = 0;
    count_dropped(1);
  }
  void record_dropped(int param, bool came) {
    record_gradient(param, came);
    count_dropped(static_cast<std::uint32_t>(param) + 2);
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
  bool got(int param) const { return nth(got_, param); }
  // A parameter whose gradient was missing on this rank when its unit was reduced; -1: none.
  int unused() const { return unused_; }
  // 0: nothing that was reduced.
  std::uint32_t dropped() const { return dropped_; }

 private:
  void clear() {
    std::fill(got_.begin(), got_.end(), false);
    unused_ = -1;
  }
  // Sums, so that the order of what is dropped between two passes does not matter.
  void count_dropped(std::uint32_t what) {
    constexpr std::uint32_t kOdd = 0x9E3779B1U;
    if (reduced_passes_ == 0) return;
    const std::uint32_t number = (what * kOdd >> 12U) + (reduced_passes_ * kOdd >> 16U);
    dropped_ = std::max(dropped_ + number, 1U);
  }

  std::vector<bool> got_;  // by parameter
  int unused_ = -1;
  bool collects_ = false;
  std::uint32_t reduced_passes_ = 0;  // the same on every rank
  std::uint32_t dropped_ = 0;
};

class GradientArrivals {
 public:
  GradientArrivals(std::span<const Unit> units, comm::Collectives& collectives, Bytes most_waiting)
      : units_(units),
        collectives_(collectives),
        most_waiting_(most_waiting),
        progress_(units.size()) {
    for (const Unit& unit : units_) {
      const std::size_t slots = unit.trainable() ? unit.layout.slots().size() : 0;
      of(unit.id).turns = std::max(1, unit.spec.tile_uses);
      of(unit.id).expected.assign(slots, of(unit.id).turns);
      of(unit.id).seen.assign(slots, 0);
    }
  }

  // From the next pass on a gradient of this slot is expected: its parameter was frozen. The order
  // is found anew, as in the first pass. `most_waiting`: as the constructor's. The same on every
  // rank.
  void expect(int unit, std::size_t slot, Bytes most_waiting) {
    Progress& p = of(unit);
    const std::size_t slots = nth(units_, unit).layout.slots().size();
    p.expected.resize(slots);
    p.seen.resize(slots);
    p.expected[slot] = p.turns;
    most_waiting_ = most_waiting;
    finds_anew_ = true;
  }

  // A backward pass starts. `first_uses`: the units in the order in which forward first used them.
  // Collective in the first pass, and in the next after expect(): rank 0's order counts.
  void begin_pass(std::span<const int> first_uses) {
    next_ = 0;
    waiting_ = Bytes();
    completion_.clear();
    if (std::exchange(finds_anew_, false) || order_.empty()) {
      passes_ = 0;
      std::vector<int> order(first_uses.rbegin(), first_uses.rend());
      share_order(order);
    }
    for (const int unit : order_) {
      Progress& p = of(unit);
      std::fill(p.seen.begin(), p.seen.end(), 0);
      p.missing = 0;
      for (const int expected : p.expected) p.missing += expected;
      p.waiting = Bytes();
      p.turns_over = 0;
      if (p.missing == 0) completion_.push_back(unit);
    }
  }
  // All units were reduced in this pass. Collective after the first one.
  void end_pass() {
    learn();
    if (++passes_ > 1) return;
    std::vector<int> order = completion_;
    order.insert(order.end(), order_.begin(), order_.end());
    share_order(order);
  }

  // A gradient of this slot has come; `unit_bytes`: what its unit's gradients take. True: the unit
  // is complete by it, and was not reduced before.
  bool record(int unit, std::size_t slot, Bytes unit_bytes) {
    Progress& p = of(unit);
    if (p.turns > 1) {
      if (++p.seen[slot] > p.turns) return false;
      completion_.push_back(unit);
      waiting_ += unit_bytes - p.waiting;  // one buffer, however many have come
      p.waiting = unit_bytes;
      return true;
    }
    if (++p.seen[slot] > p.expected[slot] || reduced(unit)) return false;
    if (--p.missing > 0) return false;
    completion_.push_back(unit);
    p.waiting = unit_bytes;
    waiting_ += unit_bytes;
    return true;
  }
  void record_reduced(int unit) {
    waiting_ -= std::exchange(of(unit).waiting, Bytes());
    ++of(unit).turns_over;
  }
  bool reduced(int unit) const { return of(unit).turns_over > 0; }  // in this pass
  // Whether the next gradient of this slot is the only one that this pass is known to bring.
  bool only_one_expected(int unit, std::size_t slot) const {
    return of(unit).expected[slot] <= 1 && of(unit).seen[slot] == 0;
  }

  // Takes the next unit of the order: next_ready() if it may be reduced now, next() in any case.
  std::optional<int> next_ready() {
    if (next_ == order_.size()) return std::nullopt;
    const int unit = order_[next_];
    if (!complete(of(unit))) {
      if (waiting_ <= most_waiting_) return std::nullopt;
      completion_.push_back(unit);  // it has waited for a gradient that may never come
    }
    return next();
  }
  std::optional<int> next() {
    if (next_ == order_.size()) return std::nullopt;
    return order_[next_++];
  }

  // Trainable units in the order of their (first) reduction; the same on every rank.
  const std::vector<int>& order() const { return units_in_order_; }

 private:
  struct Progress {
    std::vector<int> expected;  // gradients by slot in one pass, as learned
    std::vector<int> seen;      // in this pass
    int missing = 0;            // gradients that are expected and have not come
    Bytes waiting;              // its bytes, while it is complete and not reduced
    int turns = 1;              // reductions in one pass
    int turns_over = 0;         // in this pass
  };

  // The gradients that the first pass brought are expected from then on; later, the most that any
  // pass brought. So no pass waits for a parameter that got nothing in the first one.
  void learn() {
    for (const int unit : order_) {
      Progress& p = of(unit);
      for (std::size_t i = 0; i < p.expected.size(); ++i)
        p.expected[i] = passes_ == 0 ? p.seen[i] : std::max(p.expected[i], p.seen[i]);
    }
  }
  // Whether all gradients for the unit's next turn have come.
  static bool complete(const Progress& p) {
    if (p.turns == 1) return p.missing <= 0;
    return p.seen[0] > p.turns_over || p.expected[0] <= p.turns_over;
  }
  // `mine` may repeat units and hold frozen ones. The first occurrences of each trainable unit
  // count, one for each of its turns. Missing units come last.
  void share_order(std::span<const int> mine) {
    std::vector<int> placed(units_.size());
    order_.clear();
    const auto place = [&](int unit) {
      const auto index = static_cast<std::size_t>(unit);
      if (placed[index] == of(unit).turns || !units_[index].trainable()) return false;
      ++placed[index];
      order_.push_back(unit);
      return true;
    };
    for (const int unit : mine) place(unit);
    for (std::size_t i = units_.size(); i-- > 0;) {
      while (place(static_cast<int>(i))) continue;
    }
    collectives_.broadcast(std::as_writable_bytes(std::span<int>(order_)), 0);
    units_in_order_.clear();
    for (const int unit : order_) {
      if (nth(placed, unit) > 0) units_in_order_.push_back(unit);
      nth(placed, unit) = 0;
    }
  }
  Progress& of(int unit) { return nth(progress_, unit); }
  const Progress& of(int unit) const { return nth(progress_, unit); }

  std::span<const Unit> units_;
  comm::Collectives& collectives_;
  Bytes most_waiting_;
  std::vector<Progress> progress_;   // by unit; of frozen units unused
  std::vector<int> order_;           // of reductions: a unit as often as it has turns
  std::vector<int> units_in_order_;  // each once
  std::vector<int> completion_;      // order of completion in this pass
  std::size_t next_ = 0;             // index into order_ of the next unit to reduce
  Bytes waiting_;                    // of complete units that are not reduced yet, in this pass
  int passes_ = 0;                   // passes that reduced, since the order was found
  bool finds_anew_ = false;          // the order, in the next pass
};

}  // namespace strata::engine
