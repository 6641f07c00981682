// A unit at run time: its plan, its layout and where its bytes are.
//
// Bytes of a unit, by state (S = one shard, F = the whole flat buffer = world_size * S):
//   sharded, released   S of weights
//   sharded, gathered   S + F (F counted as Kind::kGathered)
//   offloaded           the same, S not in memory of the device
//   whole               F of weights, of which this rank owns slice `rank`
//   away                0; on the host what was on the device
// and, when trainable, from the engine's other parts: one fp32 gradient shard, what is kept of the
// fp32 masters beside the weights (plan/unit_plan.h), the optimizer's states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/plan/flat_layout.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// The entry of a list by a number, such as that of a unit or a parameter.
template <typename List>
decltype(auto) nth(List&& list, int index) {
  return list[static_cast<std::size_t>(index)];
}

struct Unit {
  int id = 0;
  plan::UnitSpec spec;
  plan::FlatLayout layout;
  bool whole = false;
  bool offloaded = false;         // this rank's weights rest in a StateStore, and `shard` is empty
  comm::SliceMap slices;          // of the weights, for gathering
  std::span<std::byte> shard;     // this rank's weights; lives as long as the engine
  std::span<std::byte> resident;  // the whole flat buffer where `whole`, else empty
  bool away = false;  // `shard` and `resident` have no memory now (Weights::offload_states())
  std::shared_ptr<void> memory = {};  // keeps `shard` and `resident`, also after the engine

  // An update of its shard, and of the states beside it, may still be under way until these have
  // come. Work that needs what it writes, or writes what it reads, waits for them.
  std::vector<std::shared_ptr<device::Event>> updating = {};
  void await_update(device::Stream& stream) const {
    for (const auto& event : updating) stream.wait_for(*event);
  }

  // The backward pass has updated it, before its step: until that nothing may use it, or change its
  // gradient. Then require_not_early() throws UsageError.
  bool early = false;
  void require_not_early() const {
    if (!early) return;
    throw UsageError(
        "strata.update_at: \"backward\" has updated unit '{}' in the backward pass that ends a "
        "step; "
        "until step() nothing may read its parameters or change their gradients: no second "
        "backward "
        "pass, no zero_grad(), no use after the gradient has come. Call step(), or write \"step\"",
        name());
  }

  // The frozen parameters of a trainable unit; others of it were unfrozen.
  std::vector<int> frozen = {};

  const std::string& name() const { return spec.name; }
  bool trainable() const { return spec.trainable; }
  bool trains(int param) const {
    return trainable() && std::ranges::find(frozen, param) == frozen.end();
  }
  // The tier of its gradients: that of its states, or that of other units' gradients.
  memory::Tier gradient_tier(memory::Tier others) const {
    if (!spec.place.states) return others;
    return *spec.place.states == memory::Tier::kDevice ? memory::Tier::kDevice
                                                       : memory::Tier::kHost;
  }
  // Whether the slot should get a gradient.
  bool expects(const plan::Slot& slot) const { return slot.numel.value > 0 && trains(slot.param); }
};

// The engine calls it when a unit's flat buffer gets or loses memory. The torch layer implements it
// and points the parameters there. Calls come from the engine's thread; attach() of pending units
// from any thread.
class ParameterViews : public Interface {
 public:
  virtual void attach(int unit, std::span<std::byte> flat) = 0;
  virtual void detach(int unit) = 0;
  // Whether other code than the engine holds views of an attached unit's memory that have to keep
  // their values. Then the engine calls leave() instead of detach(), which would give them a copy:
  // the views keep the memory, which `memory` owns, and the engine uses it no more.
  virtual bool held(int /*unit*/) const { return false; }
  virtual void leave(int unit, std::shared_ptr<void> /*memory*/) { detach(unit); }
  // For destructors of what owns the memory: leaves `memory()`, or detaches. If that fails, the
  // parameters keep their memory.
  template <typename Memory>
  void let_go(int unit, Memory&& memory) noexcept {
    try {
      if (held(unit))
        leave(unit, memory());
      else
        detach(unit);
    } catch (...) {  // a destructor cannot report it
    }
  }
  // The flat buffer of a unit that stays whole is being written; attach() follows when it is
  // complete. Until then a reader of its parameters must call Gatherer::complete() first. False:
  // some reader cannot be made to, so the engine must complete the unit now.
  virtual bool await(int /*unit*/) { return false; }
};

}  // namespace strata::engine
