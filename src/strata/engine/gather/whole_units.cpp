#include "strata/engine/gather/whole_units.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {

WholeUnits::WholeUnits(const std::vector<Unit>& units, comm::Collectives& collectives,
                       ParameterViews& views, StepRecorder& recorder)
    : units_(units),
      collectives_(collectives),
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
    try {
      if (views_.held(u.id)) {
        views_.leave(u.id, u.memory);
      } else {
        views_.detach(u.id);
      }
    } catch (...) {  // the parameters keep their memory; a destructor cannot report it
    }
  }
}

void WholeUnits::complete_all() {
  for (const Unit& u : units_) {
    if (u.whole) complete(u.id);
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
  const Bytes bytes(u.resident.size());
  s.recording = recorder_.begin_transfer(Activity::kLazyGather, index, bytes);
  s.work = collectives_.all_gather(u.slices, u.resident, u.name());
  recorder_.started(s.recording, *s.work);
  ++recorder_.counts().refreshes;
  recorder_.counts().refreshed += bytes;
  started_.push_back(index);
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
  if (started.empty()) return;  // on all ranks
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

}  // namespace strata::engine
