#include "strata/engine/state_offload.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <vector>

#include "strata/base/error.h"
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
  agree_on_text(collectives_, "offload_states()", states.text());
  StateSet moving = states.without(away_);
  double can = weights_.can_offload() ? 1.0 : 0.0;
  collectives_.all_reduce({&can, 1}, comm::ReduceOp::kMin);
  if (can == 0.0) moving.weights = false;
  if (moving.any()) {
    let_go_of_weights(moving.weights);
    offload_memory(moving, pinned);
  }
  return can == 1.0 || !states.weights;
}

// Until all ranks have read what others have.
void StateOffload::let_go_of_weights(bool they_move) {
  agree_after(collectives_, kOffloading, [&] {
    gatherer_.complete_all();
    if (they_move) gatherer_.invalidate(Changed::kAll);
  });
  gatherer_.free_memory();  // on all ranks or none, as gathers want it
  device_.compute_stream().synchronize();
  collectives_.barrier();
}

void StateOffload::offload_memory(const StateSet& moving, bool pinned) {
  StateSet tried = moving;
  tried.weights = false;  // they stay if this fails
  away_ |= tried;
  try {
    agree_after(collectives_, kOffloading, [&] {
      if (outside_.offload_states) outside_.offload_states(moving, pinned);
      if (moving.weights) weights_.copy_for_offload(pinned);
      reducer_.offload_states(moving.gradients, moving.gradient_buffers, pinned);
      if (optimizer_ != nullptr) optimizer_->offload_states(moving.masters);
      if (moving.masters) stores_.states->offload_states(memory::Kind::kMasterWeights, pinned);
      if (moving.moments) stores_.states->offload_states(memory::Kind::kOptimizerState, pinned);
    });
  } catch (...) {
    if (moving.weights) weights_.drop_copy();
    throw;
  }
  if (moving.weights) {
    away_.weights = true;
    gatherer_.detach_whole();
    weights_.offload_states();
  }
  collectives_.barrier();  // what others have mapped of it keeps it
  collectives_.unmap_freed();
  collectives_.barrier();
}

void StateOffload::reload_states() {
  if (!away_.any()) return;
  agree_after(collectives_, kReloading, [&] {
    weights_.reload_states();
    stores_.states->reload_states();
    reducer_.reload_states();
    if (optimizer_ != nullptr) optimizer_->reload_states();
    if (outside_.reload_states) outside_.reload_states();
  });
  if (away_.weights) {
    weights_.finish_reload();
    gatherer_.attach_whole();
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
