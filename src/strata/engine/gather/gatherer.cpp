#include "strata/engine/gather/gatherer.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {
WholeUnits::WholeUnits(const std::vector<Unit>& units, comm::Collectives& collectives,
                       device::Device& device, ParameterViews& views, StepRecorder& recorder)
    : units_(units),
      collectives_(collectives),
      device_(device),
      alone_(collectives.shard_position().held_count() == 1),
      views_(views),
      recorder_(recorder),
      slots_(units.size()) {
  attach();
}

WholeUnits::~WholeUnits() {
  const std::lock_guard lock(mutex_);
  for (const Unit& u : units_) {
    if (!u.whole || u.away) continue;
    of(u.id).work.reset();  // waits
    views_.let_go(u.id, [&] { return u.memory; });
  }
}

void WholeUnits::finish(int unit, Slot& s) {
  if (s.work == nullptr) return;
  recorder_.measure(Activity::kLazyGatherWait, unit, [&] { s.work->wait(); });
  recorder_.end(std::exchange(s.recording, nullptr));
  s.work.reset();
  if (std::exchange(s.awaited, false)) views_.attach(unit, nth(units_, unit).resident);
}

void WholeUnits::start(int index) {
  const Unit& u = nth(units_, index);
  const std::lock_guard lock(mutex_);
  Slot& s = of(index);
  STRATA_ASSERT(u.whole && s.work == nullptr);
  started_.push_back(index);
  if (alone_) {
    s.work = std::make_unique<EventWork>(u.updating, device_);
    return;
  }
  const Bytes bytes(u.resident.size());
  s.recording = recorder_.begin_transfer(Activity::kLazyGather, index, bytes);
  s.work = collectives_.all_gather(u.slices, u.resident, u.name());
  recorder_.started(s.recording, *s.work);
  ++recorder_.counts().refreshes;
  recorder_.counts().refreshed += bytes;
}

void WholeUnits::end(bool late) {
  const std::vector<int> started = std::exchange(started_, {});
  bool all_awaited = true;
  for (const int index : started) {
    const std::lock_guard lock(mutex_);
    Slot& s = of(index);
    // Another thread may have completed it meanwhile; then readers need not wait.
    s.awaited = late && s.work != nullptr && views_.await(index);
    if (s.awaited) continue;
    finish(index, s);
    all_awaited = false;
  }
  if (started.empty() || alone_) return;  // on all ranks
  auto readers = collectives_.finish_gathers();
  {
    const std::lock_guard lock(mutex_);
    readers_ = std::move(readers);
  }
  if (!all_awaited) wait_for_readers();
}

void WholeUnits::wait_for_readers() {
  const std::lock_guard lock(mutex_);
  if (readers_ == nullptr) return;
  readers_->wait();
  readers_.reset();
}

void WholeUnits::detach() {
  const std::lock_guard lock(mutex_);
  for (const Unit& u : units_) {
    if (u.whole) views_.detach(u.id);
  }
}

void WholeUnits::attach() {
  const std::lock_guard lock(mutex_);
  for (const Unit& u : units_) {
    if (u.whole) views_.attach(u.id, u.resident);
  }
}

Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which) {
  Bytes largest;
  for (const plan::ScopeSpec& scope : scopes) {
    Bytes bytes;
    for (const int index : scope.units) {
      const Unit& unit = nth(units, index);
      if (which == ScopeUnits::kAll || !unit.whole)
        bytes += align_up(unit.layout.flat_bytes(), memory::page_size());
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

namespace {

// The predicted order of the units' uses in the first pass: forward through the scopes, then
// backward. Both times a scope's units come in their order, and then its tiles one by one,
// backwards the second time.
std::vector<int> expected_uses(std::span<const plan::ScopeSpec> scopes) {
  std::vector<int> uses;
  for (const plan::ScopeSpec& scope : scopes) {
    uses.insert(uses.end(), scope.units.begin(), scope.units.end());
    uses.insert(uses.end(), scope.tiles.begin(), scope.tiles.end());
  }
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    uses.insert(uses.end(), scope->units.begin(), scope->units.end());
    uses.insert(uses.end(), scope->tiles.rbegin(), scope->tiles.rend());
  }
  return uses;
}

}  // namespace

Gatherer::Gatherer(std::vector<Unit>& units, const WeightShards& shards,
                   comm::Collectives& collectives, device::Device& device, ParameterViews& views,
                   StepRecorder& recorder, const EngineOptions& options,
                   std::span<const plan::ScopeSpec> scopes)
    : units_(units),
      collectives_(collectives),
      options_(options),
      least_ahead_(options.fetches_scopes ? largest_scope(scopes, units, ScopeUnits::kSharded)
                                          : Bytes()),
      gathers_lazily_(options.gather_lazily.value_or(device.runs_ahead())),
      order_(static_cast<int>(units.size())),
      gathered_(units, shards, collectives, device, views, recorder, order_, options, least_ahead_),
      whole_(units, collectives, device, views, recorder),
      prefetches_(options.prefetch.value > 0 &&
                  std::ranges::any_of(units, [](const Unit& u) { return !u.whole; })) {
  for (const Unit& u : units) {
    if (u.spec.tile_uses > 1) order_.expect_first_uses(u.id, u.spec.tile_uses);
  }
  if (!scopes.empty()) order_.expect(expected_uses(scopes));
}

void Gatherer::acquire(int index) {
  if (unit(index).away)
    offload::throw_offloaded(fmt::format("unit '{}' of the weights", unit(index).name()));
  unit(index).require_not_early();
  order_.record_use(index);
  gathered_.drop_idle_tiles(index);
  if (unit(index).whole)
    whole_.complete(index);
  else
    gathered_.gather(index);
  gathered_.pin(index);
  if (options_.max_reuse) gathered_.drop_what_is_not_reused_soon(index);
  if (!prefetches_) return;
  try {
    prefetch();
  } catch (...) {
    release(index);
    throw;
  }
}

void Gatherer::discard(int index) {
  release(index);
  if (unit(index).whole) return;
  if (pinned(index))
    gathered_.gather_again(index);
  else
    gathered_.drop(index);
}

void Gatherer::prefetch() {
  Bytes ahead;
  bool is_next = true;
  bool has_tile = false;
  std::int64_t distance = -1;
  for (const int next : order_.upcoming()) {
    ++distance;
    if (unit(next).whole || pinned(next)) continue;
    if (unit(next).spec.tile() && std::exchange(has_tile, true)) return;  // one tile ahead
    const Bytes bytes = gathered_.footprint(next);
    ahead += bytes;
    const bool always = std::exchange(is_next, false) || ahead <= least_ahead_;
    if (ahead > options_.prefetch && !always) return;
    if (!gathered_.released(next)) continue;
    if (!gathered_.make_room(bytes, distance) && !(always && gathered_.fits_ahead(bytes))) return;
    if (!gathered_.start_ahead(next)) return;
  }
}

void Gatherer::invalidate(Changed changed) {
  const auto concerned = [&](const Unit& u) {
    return !u.whole && (changed == Changed::kAll || u.trainable());
  };
  for (const Unit& u : units_) {
    if (!concerned(u) || !pinned(u.id)) continue;
    throw UsageError(
        "the weights of unit '{}' cannot change while it is in use; leave GatheredParameters and "
        "finish forward and backward before the step",
        u.name());
  }
  complete_all();  // what still comes must not be what is written next
  for (const Unit& u : units_) {
    if (concerned(u)) gathered_.drop(u.id);
  }
  gathered_.begin_pass();
}

// In the order of their uses where each rank may have its own, since that is learned.
std::vector<int> Gatherer::whole_units(Changed changed) const {
  std::vector<int> result;
  std::vector<bool> listed(units_.size());
  const auto add = [&](int index) {
    const Unit& u = unit(index);
    if (!u.whole || nth(listed, index)) return;
    nth(listed, index) = true;
    if (changed == Changed::kAll || u.trainable()) result.push_back(index);
  };
  if (collectives_.traits().one_sided) std::ranges::for_each(order_.next_pass(), add);
  for (const Unit& u : units_) add(u.id);
  return result;
}

void Gatherer::gather_whole(Changed changed, bool late) {
  if (!alone()) {
    for (const int index : whole_units(changed)) {
      if (!whole_.started(index)) whole_.start(index);
    }
  }
  whole_.end(late && gathers_lazily_);
}

std::vector<int> Gatherer::first_needed() const {
  std::vector<int> result;
  // All units that stay whole, which have their memory. Others: as much as may be live; at least
  // the unit that is used first, and what prefetch() would fetch beside it though there is no room.
  Bytes all;
  Bytes ahead;
  bool has_tile = false;
  for (const int index : order_.next_pass()) {
    const Unit& u = unit(index);
    if (u.whole ? !gathers_lazily_ : !prefetches_) continue;
    if (std::ranges::find(result, index) != result.end()) continue;
    if (u.whole) {
      if (u.trainable()) result.push_back(index);
      continue;
    }
    if (u.spec.tile() && !u.whole && std::exchange(has_tile, true)) break;
    all += gathered_.footprint(index);
    if (!result.empty()) ahead += gathered_.footprint(index);
    const bool always = result.size() < 2 || ahead <= least_ahead_;
    if (all > options_.max_live && (options_.max_live_is_hard || !always)) break;
    if (u.trainable()) result.push_back(index);
  }
  return result;
}

void Gatherer::fetch_first(std::span<const int> units) {
  if (alone()) return;
  for (const int index : units) {
    if (unit(index).whole) {
      whole_.start(index);
    } else if (gathered_.released(index) &&
               (!options_.max_live_is_hard ||
                gathered_.live() + gathered_.footprint(index) <= options_.max_live)) {
      gathered_.start_ahead(index);
    }
  }
}

}  // namespace strata::engine
