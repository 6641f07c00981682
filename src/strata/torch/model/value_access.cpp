#include "strata/torch/model/value_access.h"

#include <c10/core/StreamGuard.h>

#include <set>

#include "strata/base/error.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {

ValueAccess::ValueAccess(engine::Engine& engine, ParameterSet& parameters, Scopes& scopes)
    : engine_(engine), parameters_(parameters), scopes_(scopes) {}

std::vector<int> ValueAccess::units_of(std::span<const int> params) const {
  std::set<int> units;
  for (const int param : params) units.insert(engine_.weights().unit_of(param).id);
  return {units.begin(), units.end()};
}

void ValueAccess::gather(std::span<const int> params) {
  for (const int unit : units_of(params)) {
    engine_.gatherer().acquire(unit);
    ++held_[unit];
  }
}

void ValueAccess::release(std::span<const int> params, bool discard) {
  for (const int unit : units_of(params)) {
    // What an outer holder writes is its own to keep.
    const bool last = --held_[unit] == 0;
    if (discard && last) {
      engine_.gatherer().discard(unit);
    } else {
      engine_.gatherer().release(unit);
    }
  }
}

void ValueAccess::publish(std::span<const int> params, int root) {
  comm::Collectives& collectives = engine_.collectives();
  const int world = collectives.world_size();
  if (root < 0 || root >= world) {
    throw UsageError(
        fmt::format("modifier_rank must be a rank of this job, 0 to {}; got {}", world - 1, root));
  }
  for (const int param : params) {
    const engine::Unit& unit = engine_.weights().unit_of(param);
    const plan::Slot& slot = engine_.weights().slot_of(param);
    const auto flat = engine_.gatherer().flat(unit.id);
    const DType dtype = unit.layout.dtype();
    collectives.broadcast(
        flat.subspan(bytes_of(slot.offset, dtype).size(), bytes_of(slot.numel, dtype).size()),
        root);
  }
  engine_.adopt_flat(params);
  // Peers may gather from now on. A rank that waits here has read everything that it still wanted.
  collectives.barrier();
}

bool ValueAccess::read(int param) {
  if (gathered(param)) return false;
  scopes_.read(engine_.weights().unit_of(param).id);
  return true;
}

bool ValueAccess::gathered(int param) const {
  return engine_.gatherer().gathered(engine_.weights().unit_of(param).id);
}

void ValueAccess::note_step() {
  const std::lock_guard lock(step_mutex_);
  step_ = {std::this_thread::get_id(), current_stream(parameters_.place())};
}

void ValueAccess::complete(int unit) {
  std::optional<Step> step;
  {
    const std::lock_guard lock(step_mutex_);
    step = step_;
  }
  if (!step) {
    engine_.gatherer().complete(unit);
    return;
  }
  if (step->thread != std::this_thread::get_id()) parameters_.await_no_more();
  if (current_stream(parameters_.place()) == step->stream) {
    engine_.gatherer().complete(unit);
    return;
  }
  // The stream of the step waits, since the model computes there; and the host, since the reader's
  // stream has no part in it.
  const c10::StreamGuard on_the_steps_stream(step->stream);
  engine_.gatherer().complete(unit);
  engine_.device().compute_stream().synchronize();
}

}  // namespace strata::torch
