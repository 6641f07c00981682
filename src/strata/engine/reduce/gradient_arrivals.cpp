#include "strata/engine/reduce/gradient_arrivals.h"

#include <utility>

namespace strata::engine {

GradientArrivals::GradientArrivals(std::span<const Unit> units, comm::Collectives& collectives,
                                   Bytes most_waiting)
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

void GradientArrivals::expect(int unit, std::size_t slot, Bytes most_waiting) {
  Progress& p = of(unit);
  const std::size_t slots = nth(units_, unit).layout.slots().size();
  p.expected.resize(slots);
  p.seen.resize(slots);
  p.expected[slot] = p.turns;
  most_waiting_ = most_waiting;
  finds_anew_ = true;
}

void GradientArrivals::begin_pass(std::span<const int> first_uses) {
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

// `mine` may repeat units and hold frozen ones. The first occurrences of each trainable unit count,
// one for each of its turns. Missing units come last.
void GradientArrivals::share_order(std::span<const int> mine) {
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

// Whether all gradients for the unit's next turn have come.
bool GradientArrivals::complete(const Progress& p) {
  if (p.turns == 1) return p.missing <= 0;
  return p.seen[0] > p.turns_over || p.expected[0] <= p.turns_over;
}

bool GradientArrivals::record(int unit, std::size_t slot, Bytes unit_bytes) {
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

std::optional<int> GradientArrivals::next_ready() {
  if (next_ == order_.size()) return std::nullopt;
  const int unit = order_[next_];
  if (!complete(of(unit))) {
    if (waiting_ <= most_waiting_) return std::nullopt;
    completion_.push_back(unit);  // it has waited for a gradient that may never come
  }
  return next();
}

void GradientArrivals::end_pass() {
  learn();
  if (++passes_ > 1) return;
  std::vector<int> order = completion_;
  order.insert(order.end(), order_.begin(), order_.end());
  share_order(order);
}

// The gradients that the first pass brought are expected from then on; later, the most that any
// pass brought. So no pass waits for a parameter that got nothing in the first one.
void GradientArrivals::learn() {
  for (const int unit : order_) {
    Progress& p = of(unit);
    for (std::size_t i = 0; i < p.expected.size(); ++i)
      p.expected[i] = passes_ == 0 ? p.seen[i] : std::max(p.expected[i], p.seen[i]);
  }
}

}  // namespace strata::engine
