// Which gathered units go when: Gatherer's memory.
#include <algorithm>

#include "strata/engine/gather/gatherer.h"

namespace strata::engine {

bool Gatherer::make_room(Bytes bytes, std::int64_t distance) {
  while (live_ + bytes > bounds_.max_live) {
    const int evicted = farthest(bytes, distance);
    if (evicted < 0) return false;
    drop(evicted);
  }
  return true;
}

// The unit that is used last of those that nobody pins; one of `bytes` where there is any, since
// its buffer will do, while one of another size would have to be freed and this one made. -1: none
// is used later than `distance`.
int Gatherer::farthest(Bytes bytes, std::int64_t distance) const {
  int result = -1;
  std::int64_t result_distance = distance;
  bool result_fits = false;
  for (const Unit& u : units_) {
    const Slot& s = slot(u.id);
    if (u.whole || s.state == State::kReleased || s.pins > 0) continue;
    // A running prefetch is not thrown away for another prefetch.
    if (s.state == State::kGathering && distance >= 0) continue;
    const std::int64_t d = order_.distance(u.id);
    const bool fits = footprint(u.id) == bytes;
    if (d <= distance || (result_fits && !fits)) continue;
    if (d <= result_distance && fits == result_fits) continue;
    result = u.id;
    result_distance = d;
    result_fits = fits;
  }
  return result;
}

// What was used before the unit in use now, and is not within `max_reuse` elements used again.
// Checked here, and not where a unit is released: of the one that forward used last nobody knows
// yet that backward begins with it.
void Gatherer::drop_what_is_not_reused_soon(int current) {
  std::vector<bool> soon(units_.size());
  Numel between;
  for (const int next : order_.upcoming()) {
    soon[static_cast<std::size_t>(next)] = true;
    if (next != current) between += unit(next).layout.used();
    if (between > *bounds_.max_reuse) break;
  }
  for (const Unit& u : units_) {
    const Slot& s = slot(u.id);
    const bool idle = !u.whole && s.state == State::kGathered && s.pins == 0;
    if (idle && !soon[static_cast<std::size_t>(u.id)]) drop(u.id);
  }
}

void Gatherer::evict_all() {
  for (const Unit& u : units_) {
    if (!u.whole && slot(u.id).pins == 0) drop(u.id);
  }
}

}  // namespace strata::engine
