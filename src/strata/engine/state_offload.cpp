#include "strata/engine/state_offload.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <vector>

#include "strata/base/error.h"
#include "strata/engine/engine.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr std::pair<bool StateSet::*, std::string_view> kStates[] = {
    {&StateSet::moments, "optim_states"},
    {&StateSet::masters, "hp_params"},
    {&StateSet::weights, "lp_params"},
    {&StateSet::gradients, "lp_grads"},
    {&StateSet::gradient_buffers, "contiguous_grad_buffer"},
};
constexpr std::string_view kOffloading = "moving states to the host";
constexpr std::string_view kReloading = "bringing states back from the host";

}  // namespace

StateSet& StateSet::operator|=(const StateSet& others) {
  for (const auto& [state, name] : kStates) this->*state |= others.*state;
  return *this;
}

StateSet StateSet::without(const StateSet& others) const {
  StateSet result = *this;
  for (const auto& [state, name] : kStates) result.*state &= !(others.*state);
  return result;
}

std::string StateSet::text() const {
  std::vector<std::string_view> names;
  for (const auto& [state, name] : kStates) {
    if (this->*state) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void StateOffload::require_no_pass() const {
  if (!pass_.in_backward()) return;
  throw UsageError(
      "offload_states() was called within a backward pass, which needs all states; call it after "
      "backward()");
}

bool StateOffload::offload_states(const StateSet& states, bool pinned) {
  require_no_pass();
  comm::Collectives& collectives = engine_.collectives();
  agree_on_text(collectives, "offload_states()", states.text());
  engine_.finish_step();
  StateSet moving = states.without(away_);
  double can = engine_.weights().can_offload() ? 1.0 : 0.0;
  collectives.all_reduce({&can, 1}, comm::ReduceOp::kMin);
  if (can == 0.0) moving.weights = false;
  if (moving.any()) {
    let_go_of_weights(moving.weights);
    offload_memory(moving, pinned);
  }
  return can == 1.0 || !states.weights;
}

// Until all ranks have read what others have.
void StateOffload::let_go_of_weights(bool they_move) {
  comm::Collectives& collectives = engine_.collectives();
  agree_after(collectives, kOffloading, [&] {
    engine_.gatherer().complete_all();
    if (they_move) engine_.gatherer().invalidate(Changed::kAll);
  });
  engine_.gatherer().free_memory();  // on all ranks or none, as gathers want it
  engine_.device().compute_stream().synchronize();
  collectives.barrier();
}

void StateOffload::offload_memory(const StateSet& moving, bool pinned) {
  comm::Collectives& collectives = engine_.collectives();
  StateSet tried = moving;
  tried.weights = false;  // they stay if this fails
  away_ |= tried;
  try {
    agree_after(collectives, kOffloading, [&] {
      if (outside_.offload_states) outside_.offload_states(moving, pinned);
      if (moving.weights) engine_.weights().copy_for_offload(pinned);
      engine_.reducer().offload_states(moving.gradients, moving.gradient_buffers, pinned);
      if (engine_.optimizer() != nullptr) engine_.optimizer()->offload_states(moving.masters);
      if (moving.masters) stores_.states->offload_states(memory::Kind::kMasterWeights, pinned);
      if (moving.moments) stores_.states->offload_states(memory::Kind::kOptimizerState, pinned);
    });
  } catch (...) {
    if (moving.weights) engine_.weights().drop_copy();
    throw;
  }
  if (moving.weights) {
    away_.weights = true;
    engine_.gatherer().whole().detach();
    engine_.weights().offload_states();
  }
  collectives.barrier();  // what others have mapped of it keeps it
  collectives.unmap_freed();
  collectives.barrier();
}

void StateOffload::reload_states() {
  if (!away_.any()) return;
  agree_after(engine_.collectives(), kReloading, [&] {
    engine_.weights().reload_states();
    stores_.states->reload_states();
    engine_.reducer().reload_states();
    if (engine_.optimizer() != nullptr) engine_.optimizer()->reload_states();
    if (outside_.reload_states) outside_.reload_states();
  });
  if (away_.weights) {
    for (Unit& unit : engine_.weights().units()) unit.away = false;
    engine_.gatherer().whole().attach();
  }
  away_ = {};
}

void StateOffload::refuse(bool missing, std::string_view call) const {
  if (!missing) return;
  throw UsageError(
      "{} needs states that offload_states() has moved to the host; call reload_states() first; "
      "away are {}",
      call, away_.text());
}

}  // namespace strata::engine
