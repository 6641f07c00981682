#include "strata/engine/gather/gatherer.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// Goes when nothing that was queued uses it: the model's kernels, and gathers, for each of which
// the compute stream was told to wait before the memory was given back.
class GatheredMemory final : public device::Memory {
 public:
  GatheredMemory(device::Device& device, Bytes bytes)
      : device_(device), memory_(device.allocate(bytes, memory::Kind::kGathered)) {}
  ~GatheredMemory() override {
    try {
      device_.compute_stream().synchronize();
    } catch (const Error&) {  // the device has failed; whoever waits for its work is told
    }
  }
  std::span<std::byte> bytes() override { return memory_->bytes(); }

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

}  // namespace

Gatherer::Gatherer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                   ParameterViews& views, StepRecorder& recorder, GatherBounds bounds)
    : units_(units),
      collectives_(collectives),
      views_(views),
      recorder_(recorder),
      bounds_(bounds),
      order_(static_cast<int>(units.size())),
      pool_([&device](Bytes bytes) { return std::make_unique<GatheredMemory>(device, bytes); }),
      slots_(units.size()),
      prefetches_(bounds.prefetch.value > 0 &&
                  std::any_of(units.begin(), units.end(), [](const Unit& u) { return !u.whole; })) {
  if (bounds.hard) pool_.set_total_limit(bounds.max_live);
  for (Unit& u : units_) {
    if (!u.whole) continue;
    slot(u.id).state = State::kGathered;
    views_.attach(u.id, u.resident);
  }
}

Gatherer::~Gatherer() {
  for (const Unit& u : units_) {
    Slot& s = slot(u.id);
    s.work.reset();  // waits
    if (s.state == State::kGathered || u.whole) views_.detach(u.id);
  }
}

void Gatherer::start_pass() {
  order_.start_pass();
  if (!bounds_.hard) pool_.end_round();
}

bool Gatherer::gathered(int index) const {
  return slot(index).state == State::kGathered;
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
  if (unit(index).whole) {
    complete(index);
  } else {
    gather(index);
  }
  ++slot(index).pins;
  if (bounds_.max_reuse) drop_what_is_not_reused_soon(index);
  if (!prefetches_) return;
  try {
    prefetch();
  } catch (...) {
    release(index);
    throw;
  }
}

void Gatherer::count_use(int index) {
  StepCounts& counts = recorder_.counts();
  switch (slot(index).state) {
    case State::kReleased:
      ++counts.late_fetches;
      return;
    case State::kGathering:
      ++counts.prefetch_hits;
      return;
    case State::kGathered:
      ++counts.kept;
      return;
  }
}

void Gatherer::gather(int index) {
  Slot& s = slot(index);
  count_use(index);
  if (s.state == State::kReleased) {
    make_room(footprint(index), -1);  // it may exceed the bound, but only after all else is gone
    s.memory = take(index);
    start(index);
  }
  if (s.state == State::kGathering) finish(index);
}

void Gatherer::complete(int index) {
  if (unit(index).whole && slot(index).state == State::kGathering) finish(index);
}

void Gatherer::complete_all() {
  for (const Unit& u : units_) complete(u.id);
}

void Gatherer::release(int index) {
  Slot& s = slot(index);
  STRATA_ASSERT(s.pins > 0);
  if (--s.pins > 0 || unit(index).whole) return;
  if (live_ > bounds_.max_live) drop(index);
}

void Gatherer::discard(int index) {
  release(index);
  if (unit(index).whole) return;
  if (slot(index).pins == 0) {
    drop(index);
  } else {
    collectives_.all_gather(unit(index).slices, flat(index), unit(index).name())->wait();
  }
}

Gatherer::Pool::Lease Gatherer::take(int index) {
  const Bytes bytes = unit(index).layout.flat_bytes();
  try {
    return pool_.acquire(bytes);
  } catch (const OutOfMemoryError&) {
    // The device has less than the bound allows.
    if (live_.value == 0) throw;
  }
  evict_all();
  try {
    return pool_.acquire(bytes);
  } catch (const OutOfMemoryError& error) {
    report_exhausted(index, error.what());
  }
}

void Gatherer::report_exhausted(int index, const std::string& cause) const {
  std::string pinned;
  for (const Unit& u : units_) {
    if (u.whole || slot(u.id).pins == 0) continue;
    pinned += fmt::format("{}'{}' ({})", pinned.empty() ? "" : ", ", u.name(),
                          to_string(footprint(u.id)));
  }
  throw OutOfMemoryError(fmt::format(
      "the weights of unit '{}' cannot be gathered; in use at the same time and gathered: {}; {}",
      unit(index).name(), pinned.empty() ? "no other unit" : pinned, cause));
}

// The unit has its memory.
void Gatherer::start(int index) {
  const Unit& u = unit(index);
  Slot& s = slot(index);
  live_ += footprint(index);
  s.state = State::kGathering;
  s.recording = recorder_.begin_transfer(Activity::kGather, index, u.layout.flat_bytes());
  try {
    s.work = collectives_.all_gather(u.slices, s.memory.bytes().first(u.layout.flat_bytes().size()),
                                     u.name());
  } catch (...) {
    drop(index);
    throw;
  }
  recorder_.started(s.recording, *s.work);
  ++recorder_.counts().gathers;
  recorder_.counts().gathered += u.layout.flat_bytes();
}

void Gatherer::finish(int index) {
  Slot& s = slot(index);
  const bool whole = unit(index).whole;
  try {
    recorder_.measure(whole ? Activity::kRefreshWait : Activity::kGatherWait, index,
                      [&] { s.work->wait(); });
  } catch (...) {
    if (!whole) drop(index);
    throw;
  }
  recorder_.end(std::exchange(s.recording, nullptr));
  s.work.reset();
  s.state = State::kGathered;
  if (!whole || std::exchange(s.awaited, false)) views_.attach(index, flat(index));
}

void Gatherer::drop(int index) {
  Slot& s = slot(index);
  if (s.state == State::kReleased) return;
  if (s.state == State::kGathered) views_.detach(index);
  s.work.reset();
  s.recording.reset();
  s.memory = {};
  s.state = State::kReleased;
  live_ -= footprint(index);
}

void Gatherer::prefetch() {
  Bytes ahead;
  bool is_next = true;
  std::int64_t distance = -1;
  for (const int next : order_.upcoming()) {
    ++distance;
    Slot& s = slot(next);
    if (unit(next).whole || s.pins > 0) continue;
    const Bytes bytes = footprint(next);
    ahead += bytes;
    const bool always = std::exchange(is_next, false) || ahead <= bounds_.least_ahead;
    if (ahead > bounds_.prefetch && !always) return;
    if (s.state != State::kReleased) continue;
    if (!make_room(bytes, distance) && !(always && fits_ahead(bytes))) return;
    if (!start_if_it_fits(next)) return;
  }
}

// Beside what is in use, and no more than is fetched ahead anyway: where the order was not
// foreseen, what was fetched in vain stays until it is evicted for a unit in use.
bool Gatherer::fits_ahead(Bytes bytes) const {
  if (bounds_.hard) return false;
  Bytes unpinned = bytes;
  for (const Unit& u : units_) {
    const Slot& s = slot(u.id);
    if (!u.whole && s.state != State::kReleased && s.pins == 0) unpinned += footprint(u.id);
  }
  return unpinned <= std::max(bounds_.least_ahead, bytes);
}

bool Gatherer::start_if_it_fits(int index) {
  try {
    slot(index).memory = pool_.acquire(unit(index).layout.flat_bytes());
  } catch (const OutOfMemoryError&) {
    return false;  // its use will evict what it must, and tell what is missing
  }
  start(index);
  return true;
}

void Gatherer::invalidate(Changed changed) {
  const auto concerned = [&](const Unit& u) {
    return !u.whole && (changed == Changed::kAll || u.trainable());
  };
  for (const Unit& u : units_) {
    if (!concerned(u) || slot(u.id).pins == 0) continue;
    throw UsageError(
        fmt::format("the weights of unit '{}' cannot change while it is in use; leave "
                    "GatheredParameters and finish forward and backward before the step",
                    u.name()));
  }
  complete_all();  // what still comes must not be what is written next
  for (const Unit& u : units_) {
    if (concerned(u)) drop(u.id);
  }
}

}  // namespace strata::engine
