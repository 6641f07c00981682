// A script's offload_states() and reload_states(): moves states off the device for a while, so that
// the script can use their memory, and brings them back with the same bits. States on the host or
// on a drive stay there. Meanwhile calls that need them are refused (UsageError): a forward needs
// the weights; a backward pass needs those and the gradients' memory; a step, checkpoints and the
// setting of values need everything.
//
// Threads: one thread at a time. Ownership: borrows all; the owner of each device memory keeps its
// copy on the host. Errors: UsageError; OutOfMemoryError where the host, or later the device, has
// no room. After an error of offload_states(), except for calls out of order, all its states count
// as away, and reload_states() brings back those that have moved. After an error of
// reload_states(), it may be called again.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "strata/engine/pass_state.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

class Engine;

// Kinds of states, by the names that scripts know.
struct StateSet {
  bool moments = false;           // optim_states
  bool masters = false;           // hp_params: what is kept of them beside the weights
  bool weights = false;           // lp_params
  bool gradients = false;         // lp_grads: reduced ones
  bool gradient_buffers = false;  // contiguous_grad_buffer: gradients on their way there

  bool any() const { return *this != StateSet(); }
  bool operator==(const StateSet&) const = default;
  StateSet& operator|=(const StateSet& others);
  StateSet without(const StateSet& others) const;
  std::string text() const;  // their names; "" for none
};

class StateOffload {
 public:
  // States of a user's optimizer, which the layer above keeps. Both calls take part in no
  // collective; if one throws, all ranks get an error.
  struct Outside {
    // The engine has moved no state yet, and will refuse no more.
    std::function<void(const StateSet& moving, bool pinned)> offload_states;
    // The engine's own states are back. Called again after an error.
    std::function<void()> reload_states;
  };

  // `stores` and `pass`: of the engine.
  StateOffload(Engine& engine, const Stores& stores, const PassState& pass)
      : engine_(engine), stores_(stores), pass_(pass) {}

  // The first checks of offload_states(), for callers that have work to do before it.
  void require_no_pass() const;
  // Collective; the same on every rank. Not within a backward pass. States that are away stay away.
  // Releases gathered weights, and frees the memory that is kept for gathers. False: `states`
  // includes weights, and those stay, since the collectives cannot give their memory back.
  bool offload_states(const StateSet& states, bool pinned);
  // Collective: when it returns, all states are back. Does nothing if none are away.
  void reload_states();

  void set_outside(Outside outside) { outside_ = std::move(outside); }

  const StateSet& away() const { return away_; }
  // `call`: the action of the caller, for the message.
  void require_all(std::string_view call) const { refuse(away_.any(), call); }
  void require_weights(std::string_view call) const { refuse(away_.weights, call); }
  void require_for_backward(std::string_view call) const {
    refuse(away_.weights || away_.gradients || away_.gradient_buffers, call);
  }

 private:
  void let_go_of_weights(bool they_move);
  void offload_memory(const StateSet& moving, bool pinned);
  void refuse(bool missing, std::string_view call) const;

  Engine& engine_;
  const Stores& stores_;
  const PassState& pass_;
  Outside outside_;  // no functions: there are none
  StateSet away_;
};

}  // namespace strata::engine
