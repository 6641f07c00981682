#include "strata/engine/state_offload.h"

#include <fmt/format.h>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr std::string_view kOffloading = "moving states to the host";
constexpr std::string_view kReloading = "bringing states back from the host";

}  // namespace

std::string StateSet::text() const {
  std::string names;
  const auto add = [&](bool has, std::string_view name) {
    if (has) names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  };
  add(moments, "optim_states");
  add(masters, "hp_params");
  add(weights, "lp_params");
  add(gradients, "lp_grads");
  add(gradient_buffers, "contiguous_grad_buffer");
  return names;
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
  StateSet moving = states;
  double can = weights_.can_offload() ? 1.0 : 0.0;
  collectives_.all_reduce({&can, 1}, comm::ReduceOp::kMin);
  if (can == 0.0) moving.weights = false;
  moving.moments = moving.moments && !away_.moments;
  moving.masters = moving.masters && !away_.masters;
  moving.weights = moving.weights && !away_.weights;
  moving.gradients = moving.gradients && !away_.gradients;
  moving.gradient_buffers = moving.gradient_buffers && !away_.gradient_buffers;
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
  away_.moments |= moving.moments;
  away_.masters |= moving.masters;
  away_.gradients |= moving.gradients;
  away_.gradient_buffers |= moving.gradient_buffers;
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
  throw UsageError(fmt::format(
      "{} needs states that offload_states() has moved to the host; call reload_states() first; "
      "away are {}",
      call, away_.text()));
}

void StateOffload::require_all(std::string_view call) const {
  refuse(away_.any(), call);
}

void StateOffload::require_weights(std::string_view call) const {
  refuse(away_.weights, call);
}

void StateOffload::require_for_backward(std::string_view call) const {
  refuse(away_.weights || away_.gradients || away_.gradient_buffers, call);
}

}  // namespace strata::engine
