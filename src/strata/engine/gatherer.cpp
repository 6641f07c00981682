#include "strata/engine/gatherer.h"

#include <algorithm>
#include <limits>

#include "strata/base/error.h"

namespace strata::engine {

Gatherer::Gatherer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                   ParameterViews& views, GatherBounds bounds)
    : units_(units),
      collectives_(collectives),
      views_(views),
      bounds_(bounds),
      order_(static_cast<int>(units.size())),
      pool_([&device](Bytes bytes) { return device.allocate(bytes, memory::Kind::kGathered); },
            Bytes()),
      slots_(units.size()) {
  for (Unit& u : units_) {
    if (u.whole) views_.attach(u.id, u.resident);
  }
}

Gatherer::~Gatherer() {
  for (const Unit& u : units_) {
    Slot& s = slot(u.id);
    s.work.reset();  // waits
    if (s.state == State::kGathered || u.whole) views_.detach(u.id);
  }
}

bool Gatherer::gathered(int index) const {
  return units_[static_cast<std::size_t>(index)].whole || slot(index).state == State::kGathered;
}

bool Gatherer::pinned(int index) const {
  return slot(index).pins > 0;
}

std::span<std::byte> Gatherer::flat(int index) const {
  const Unit& u = units_[static_cast<std::size_t>(index)];
  if (u.whole) return u.resident;
  STRATA_ASSERT(slot(index).state == State::kGathered);
  return slot(index).memory.bytes().first(u.layout.flat_bytes().size());
}

void Gatherer::acquire(int index) {
  order_.note_use(index);
  if (!unit(index).whole) {
    Slot& s = slot(index);
    if (s.state == State::kReleased) start(index);
    if (s.state == State::kGathering) finish(index);
  }
  ++slot(index).pins;
  prefetch();
}

void Gatherer::release(int index) {
  Slot& s = slot(index);
  STRATA_ASSERT(s.pins > 0);
  if (--s.pins > 0 || unit(index).whole) return;
  if (live_ > bounds_.max_live) drop(index);
}

void Gatherer::discard(int index) {
  release(index);
  if (slot(index).pins == 0 && !unit(index).whole) drop(index);
}

void Gatherer::start(int index) {
  Unit& u = unit(index);
  Slot& s = slot(index);
  const Bytes bytes = u.layout.flat_bytes();
  make_room(bytes, -1);  // a unit in use may exceed the bound, but only after all else is gone
  s.memory = pool_.acquire(bytes);
  live_ += bytes;
  s.state = State::kGathering;
  try {
    s.work = collectives_.all_gather(u.slices, s.memory.bytes().first(bytes.size()), u.name());
  } catch (...) {
    drop(index);
    throw;
  }
}

void Gatherer::finish(int index) {
  Slot& s = slot(index);
  try {
    s.work->wait();
  } catch (...) {
    drop(index);
    throw;
  }
  s.work.reset();
  s.state = State::kGathered;
  views_.attach(index, flat(index));
}

void Gatherer::drop(int index) {
  Slot& s = slot(index);
  if (s.state == State::kReleased) return;
  if (s.state == State::kGathered) views_.detach(index);
  s.work.reset();
  s.memory = {};
  s.state = State::kReleased;
  live_ -= unit(index).layout.flat_bytes();
}

bool Gatherer::make_room(Bytes bytes, std::int64_t distance) {
  while (live_ + bytes > bounds_.max_live) {
    int farthest = -1;
    std::int64_t farthest_distance = distance;
    for (const Unit& u : units_) {
      const Slot& s = slot(u.id);
      if (s.state == State::kReleased || s.pins > 0) continue;
      // A running prefetch is not thrown away for another prefetch.
      if (s.state == State::kGathering && distance >= 0) continue;
      const std::int64_t d = order_.distance(u.id);
      if (d > farthest_distance) {
        farthest = u.id;
        farthest_distance = d;
      }
    }
    if (farthest < 0) return false;
    drop(farthest);
  }
  return true;
}

void Gatherer::prefetch() {
  if (bounds_.prefetch.value <= 0) return;
  Bytes ahead;
  std::int64_t distance = 0;
  for (const int next : order_.upcoming()) {
    const Unit& u = unit(next);
    const Slot& s = slot(next);
    if (u.whole || s.pins > 0) continue;
    ahead += u.layout.flat_bytes();
    if (ahead > bounds_.prefetch) return;
    if (s.state == State::kReleased) {
      if (!make_room(u.layout.flat_bytes(), distance)) return;
      start(next);
    }
    ++distance;
  }
}

void Gatherer::invalidate() {
  for (const Unit& u : units_) {
    if (u.whole) continue;
    if (slot(u.id).pins > 0) {
      throw UsageError(
          fmt::format("the weights of unit '{}' cannot change while it is in use; leave "
                      "GatheredParameters and finish "
                      "forward and backward before the step",
                      u.name()));
    }
    drop(u.id);
  }
}

void Gatherer::evict_all() {
  for (const Unit& u : units_) {
    if (!u.whole && slot(u.id).pins == 0) drop(u.id);
  }
}

void Gatherer::refresh_whole() {
  if (collectives_.world_size() == 1) return;
  std::vector<std::unique_ptr<comm::Work>> works;
  for (const Unit& u : units_) {
    if (u.whole) works.push_back(collectives_.all_gather(u.slices, u.resident, u.name()));
  }
  for (const auto& work : works) work->wait();
}

}  // namespace strata::engine
