// What the Gatherer does when shards have changed: whole units are refreshed, and what the next
// pass needs first is fetched.
#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/gather/gatherer.h"

namespace strata::engine {

// In the order of their uses where each rank may have its own, since that is learned.
std::vector<int> Gatherer::whole_units(Changed changed) const {
  std::vector<int> result;
  std::vector<bool> listed(units_.size());
  const auto add = [&](int index) {
    const Unit& u = unit(index);
    if (!u.whole || listed[static_cast<std::size_t>(index)]) return;
    listed[static_cast<std::size_t>(index)] = true;
    if (changed == Changed::kAll || u.trainable()) result.push_back(index);
  };
  if (collectives_.one_sided()) std::ranges::for_each(order_.next_pass(), add);
  for (const Unit& u : units_) add(u.id);
  return result;
}

void Gatherer::refresh_whole(Changed changed, bool late) {
  if (collectives_.shard_place().held_count() == 1) return;
  for (const int index : whole_units(changed)) {
    if (!begun(index)) start_refresh(index);
  }
  for (const int index : std::exchange(refreshing_, {})) {
    slot(index).awaited = late && bounds_.refresh_late && views_.await(index);
    if (!slot(index).awaited) complete(index);
  }
}

std::vector<int> Gatherer::first_needed() const {
  std::vector<int> result;
  // As much as may be live; at least the unit that is used first, and what prefetch() would fetch
  // beside it though there is no room.
  Bytes all;
  Bytes ahead;
  for (const int index : order_.next_pass()) {
    const Unit& u = unit(index);
    if (u.whole ? !bounds_.refresh_late : !prefetches_) continue;
    if (std::ranges::find(result, index) != result.end()) continue;
    all += footprint(index);
    if (!result.empty()) ahead += footprint(index);
    const bool always = result.size() < 2 || ahead <= bounds_.least_ahead;
    if (all > bounds_.max_live && (bounds_.hard || !always)) break;
    if (u.trainable()) result.push_back(index);
  }
  return result;
}

void Gatherer::fetch_first(std::span<const int> units) {
  if (collectives_.shard_place().held_count() == 1) return;
  for (const int index : units) {
    if (unit(index).whole) {
      start_refresh(index);
    } else if (slot(index).state == State::kReleased &&
               (!bounds_.hard || live_ + footprint(index) <= bounds_.max_live)) {
      start_if_it_fits(index);
    }
  }
}

bool Gatherer::begun(int index) const {
  return std::ranges::find(refreshing_, index) != refreshing_.end();
}

void Gatherer::abandon_refresh() {
  complete_all();
  refreshing_.clear();
}

void Gatherer::start_refresh(int index) {
  const Unit& u = unit(index);
  Slot& s = slot(index);
  STRATA_ASSERT(u.whole && s.state == State::kGathered);
  const Bytes bytes(u.resident.size());
  s.recording = recorder_.begin_transfer(Activity::kRefresh, index, bytes);
  s.work = collectives_.all_gather(u.slices, u.resident, u.name());
  recorder_.started(s.recording, *s.work);
  s.state = State::kGathering;
  ++recorder_.counts().refreshes;
  recorder_.counts().refreshed += bytes;
  refreshing_.push_back(index);
}

}  // namespace strata::engine
