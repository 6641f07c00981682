// States that leave the device's memory for a while, so that somebody else can use it, and come
// back with the same bits: offload_states() and reload_states() of a script. What rests on the host
// or on a drive anyway stays there.
//
// Until they are back, what needs them is refused (UsageError): a forward needs the weights; a
// backward pass those and the gradients' memory; a step, checkpoints and the setting of values need
// everything.
//
// Threads: one thread at a time. Ownership: borrows all; owns the copies on the host through those
// whose memory it was. Errors: UsageError; OutOfMemoryError where the host, or later the device,
// has no room. After an error of park(), but for those of calls out of order, the states count as
// away, and unpark() brings back those that are; after one of unpark() it may be called again.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/pass_state.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

// Kinds of states, by the names that scripts know.
struct StateSet {
  bool moments = false;           // optim_states
  bool masters = false;           // hp_params: what is kept of them beside the weights
  bool weights = false;           // lp_params
  bool gradients = false;         // lp_grads: reduced ones
  bool gradient_buffers = false;  // contiguous_grad_buffer: gradients on their way there

  bool any() const { return moments || masters || weights || gradients || gradient_buffers; }
  std::string text() const;  // their names; "" for none
};

class StateParking {
 public:
  // States of training that the layer above keeps itself: those of an optimizer of the user's. Both
  // calls take part in no collective; where one throws, all ranks get an error.
  struct Outside {
    // Nothing has moved yet, and nothing refuses any more. `moving`: what leaves now.
    std::function<void(const StateSet& moving, bool pinned)> park;
    // The engine's own are back. Called again after an error.
    std::function<void()> unpark;
  };

  // `optimizer` may be null.
  StateParking(Weights& weights, Gatherer& gatherer, Reducer& reducer, ShardedOptimizer* optimizer,
               const Stores& stores, comm::Collectives& collectives, device::Device& device,
               const PassState& pass)
      : weights_(weights),
        gatherer_(gatherer),
        reducer_(reducer),
        optimizer_(optimizer),
        stores_(stores),
        collectives_(collectives),
        device_(device),
        pass_(pass) {}

  // What park() refuses first, for who has to do something before it.
  void require_no_pass() const;
  // Collective; the same on every rank. Not within a backward pass. What is away already stays so.
  // Gathered weights are released, and what is kept for gathers is freed. False: weights were among
  // `states` and stay, since the collectives cannot give their memory back.
  bool park(const StateSet& states, bool pinned);
  // Collective: everything is back when it returns. Nothing where nothing is away.
  void unpark();

  void set_outside(Outside outside) { outside_ = std::move(outside); }

  const StateSet& away() const { return away_; }
  // `call`: what is to be done, for the message.
  void require_all(std::string_view call) const;
  void require_weights(std::string_view call) const;
  void require_for_backward(std::string_view call) const;

 private:
  void let_go_of_weights(bool they_move);
  void park_memory(const StateSet& moving, bool pinned);
  void refuse(bool missing, std::string_view call) const;

  Weights& weights_;
  Gatherer& gatherer_;
  Reducer& reducer_;
  ShardedOptimizer* optimizer_;
  const Stores& stores_;
  comm::Collectives& collectives_;
  device::Device& device_;
  const PassState& pass_;
  Outside outside_;  // no functions: there are none
  StateSet away_;
};

}  // namespace strata::engine
