#include "strata/engine/state_parking.h"

#include <fmt/format.h>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/engine/unit/consistency.h"

namespace strata::engine {
namespace {

constexpr std::string_view kParking = "moving states to the host";
constexpr std::string_view kUnparking = "bringing states back from the host";

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

void StateParking::require_no_pass() const {
  if (!pass_.in_backward()) return;
  throw UsageError(
      "offload_states() was called within a backward pass, which needs all states; call it after "
      "backward()");
}

bool StateParking::park(const StateSet& states, bool pinned) {
  require_no_pass();
  require_same_text(collectives_, "offload_states()", states.text());
  StateSet moving = states;
  double can = weights_.can_park() ? 1.0 : 0.0;
  collectives_.all_reduce({&can, 1}, comm::ReduceOp::kMin);
  if (can == 0.0) moving.weights = false;
  moving.moments = moving.moments && !away_.moments;
  moving.masters = moving.masters && !away_.masters;
  moving.weights = moving.weights && !away_.weights;
  moving.gradients = moving.gradients && !away_.gradients;
  moving.gradient_buffers = moving.gradient_buffers && !away_.gradient_buffers;
  if (moving.any()) {
    let_go_of_weights(moving.weights);
    park_memory(moving, pinned);
  }
  return can == 1.0 || !states.weights;
}

// Until all ranks have read what others have.
void StateParking::let_go_of_weights(bool they_move) {
  together(collectives_, kParking, [&] {
    gatherer_.complete_all();
    if (they_move) gatherer_.invalidate(Changed::kAll);
  });
  gatherer_.free_memory();  // on all ranks or none, as gathers want it
  device_.compute_stream().synchronize();
  collectives_.barrier();
}

void StateParking::park_memory(const StateSet& moving, bool pinned) {
  away_.moments |= moving.moments;
  away_.masters |= moving.masters;
  away_.gradients |= moving.gradients;
  away_.gradient_buffers |= moving.gradient_buffers;
  try {
    together(collectives_, kParking, [&] {
      if (outside_.park) outside_.park(moving, pinned);
      if (moving.weights) weights_.copy_for_parking(pinned);
      reducer_.park(moving.gradients, moving.gradient_buffers, pinned);
      if (optimizer_ != nullptr) optimizer_->park(moving.masters);
      if (moving.masters) stores_.states->park(memory::Kind::kMasterWeights, pinned);
      if (moving.moments) stores_.states->park(memory::Kind::kOptimizerState, pinned);
    });
  } catch (...) {
    if (moving.weights) weights_.drop_copy();
    throw;
  }
  if (moving.weights) {
    away_.weights = true;
    gatherer_.detach_whole();
    weights_.park();
  }
  collectives_.barrier();  // what others have mapped of it keeps it
  collectives_.unmap_freed();
  collectives_.barrier();
}

void StateParking::unpark() {
  if (!away_.any()) return;
  together(collectives_, kUnparking, [&] {
    weights_.unpark();
    stores_.states->unpark();
    reducer_.unpark();
    if (optimizer_ != nullptr) optimizer_->unpark();
    if (outside_.unpark) outside_.unpark();
  });
  if (away_.weights) {
    weights_.settle_unparked();
    gatherer_.attach_whole();
  }
  away_ = {};
}

void StateParking::refuse(bool missing, std::string_view call) const {
  if (!missing) return;
  throw UsageError(fmt::format(
      "{} needs states that offload_states() has moved to the host; call reload_states() first; "
      "away are {}",
      call, away_.text()));
}

void StateParking::require_all(std::string_view call) const {
  refuse(away_.any(), call);
}

void StateParking::require_weights(std::string_view call) const {
  refuse(away_.weights, call);
}

void StateParking::require_for_backward(std::string_view call) const {
  refuse(away_.weights || away_.gradients || away_.gradient_buffers, call);
}

}  // namespace strata::engine
