// The model's parameters as torch sees them: tensors in the engine's memory.
//
// Each parameter has a torch storage (ParameterStorage), to which gathering gives memory. A
// gathered parameter is a view of its full shape; a released one is empty, shape [0], as frameworks
// made for sharded training expect. The user's tensor object never changes.
//
// Views that a script holds (a state dict, p.detach(), p.numpy()) keep their values when the unit
// is released: held(), leave(). While a graph that needs the unit is pending, they cannot be told
// from tensors that autograd saved; reading one is then torch's RuntimeError until the next gather,
// unless keep_views() was called.
//
// During the lazy all-gather of a unit that stays whole its parameters are pending (PendingStorage)
// until its attach(), unless a script holds a view of its memory, whose reader cannot wait.
//
// A script may give its tensor object other memory (`p.data = t`, `p.set_(t)`), which only
// replaced() tells. If the next attach() or detach() comes first, lost() names the parameter,
// unless the replacement brings no values: an empty tensor in place of a released parameter, or the
// same values in another dtype, as module.to(dtype) leaves them (take_converted()). If the tensor's
// kind has changed, torch gives it a new AccumulateGrad node; put_back() restores the one that
// settle() saw, with its hooks.
//
// Threads: one at a time, except for readers of pending parameters and for await_no_more().
// Ownership: shares the user's tensors until unbind(). The engine owns the memory behind them, and
// after leave() the views do. After the engine is gone, released parameters stay empty until new
// data is set.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weights.h"
#include "strata/torch/model/parameter_storage.h"

namespace strata::torch {

// torch's owning pointer to a node of the graph, whose type differs between its versions, and the
// weak one to it.
using NodePtr =
    decltype(::torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
using WeakNodePtr =
    std::conditional_t<std::is_same_v<NodePtr, std::shared_ptr<::torch::autograd::Node>>,
                       std::weak_ptr<::torch::autograd::Node>,
                       c10::weak_intrusive_ptr<::torch::autograd::Node>>;

class ParameterSet final : public engine::ParameterViews {
 public:
  // `variables`: by parameter index, on any device until bind(). `place`: the device of the
  // engine's memory; where views keep that memory, `device` must outlive it.
  ParameterSet(std::vector<at::Tensor> variables, c10::Device place,
               std::shared_ptr<void> device = nullptr);

  // Gives every parameter its storage, view and full shape, still without memory: the moment to
  // make autograd nodes, which record a shape. Before it, attach() only records the memory, so that
  // the parameters' own values can be read first.
  void bind(const engine::Weights& weights);
  // After bind(), when autograd's nodes are made: attaches the units that have memory and releases
  // the others.
  void settle();
  // Gives every parameter the tensor in `full`, or an empty one where that is undefined or `full`
  // empty, and forgets the parameters. Does nothing before bind().
  void unbind(std::span<const at::Tensor> full = {});

  // Sets the function that says whether a pending graph needs the unit; null: none does.
  void on_graphs(std::function<bool(int unit)> pending) { pending_ = std::move(pending); }
  // Sets the function that completes a pending unit. Until it is set, no unit is pending.
  void on_wanted(std::function<void(int unit)> complete) { complete_ = std::move(complete); }
  // From now on values are complete before parameters point at them. Any thread.
  void await_no_more() { may_await_ = false; }
  // Called before the object that completes pending values is destroyed.
  void forget_pending();

  void attach(int unit, std::span<std::byte> flat) override;
  void detach(int unit) override;
  bool held(int unit) const override {
    if (units_.empty() || others(unit) == 0) return false;
    const bool pending = pending_ && pending_(unit);
    return engine::nth(units_, unit).keeps_views || !pending;
  }
  // The unit's present views keep their values, even while a graph is pending.
  void keep_views(int unit) { engine::nth(units_, unit).keeps_views = true; }
  void leave(int unit, std::shared_ptr<void> memory) override;
  bool await(int unit) override;

  const at::Tensor& variable(int param) const { return engine::nth(variables_, param); }
  // The full-shape view; its storage has memory while the unit is gathered.
  const at::Tensor& full_view(int param) const { return storage_of(param).view(); }
  // The number of tensors, beside the user's and the engine's, that share this unit's memory.
  std::size_t others(int unit) const;
  // Whether a view of this sharded unit's memory, or a tensor that autograd saved, may be there.
  // May be true without one.
  bool held_elsewhere(int unit) const;
  bool replaced(int param) const;  // whether the user's tensor has other memory than its own
  // The first replaced parameter whose values differ from the unit's in any bit; -1: none. Puts the
  // others back. Waits for the device if any is replaced.
  int find_changed();
  // A parameter whose replaced memory went when its unit was gathered or released; -1: none.
  int lost() const { return lost_; }
  // A parameter to which a script gave another dtype or memory format, with no values or with the
  // same values, and which has its own again; -1: none since the last call.
  int take_converted() { return std::exchange(converted_, -1); }
  // Copies a replaced tensor's values into its gathered unit: same shape, any dtype.
  void take_in(int param);
  // Points the user's tensor at the unit's memory again and restores its gradient node. Clears
  // lost() for it.
  void put_back(int param);
  // Finds a parameter by the identity of its tensor; -1: it is not one of these.
  int index_of(const at::Tensor& variable) const;
  int size() const { return static_cast<int>(variables_.size()); }
  c10::Device place() const { return place_; }

 private:
  enum class Pointed { kAtNothing, kAtUnit, kAtPending };
  struct UnitParams {
    std::vector<int> params;
    Pointed pointed = Pointed::kAtUnit;  // where bind() leaves them
    bool keeps_views = false;            // until the unit goes
  };

  ParameterStorage& storage_of(int param) { return engine::nth(storages_, param); }
  const ParameterStorage& storage_of(int param) const { return engine::nth(storages_, param); }
  const UnitParams& unit_of(int param) const {
    return engine::nth(units_, engine::nth(unit_of_, param));
  }
  const at::Tensor& target(int param, Pointed at);
  void point_all(int unit, Pointed at);
  bool has_values_of_unit(int param);
  bool has_nothing_new(int param);
  void restore_node(int param);

  std::vector<at::Tensor> variables_;
  std::unordered_map<const void*, int> index_;  // by TensorImpl
  c10::Device place_;
  std::shared_ptr<void> device_;
  std::function<bool(int unit)> pending_;
  std::function<void(int unit)> complete_;
  std::atomic<bool> may_await_{true};
  std::vector<ParameterStorage> storages_;  // by parameter, after bind()
  std::vector<at::Tensor> empties_;
  std::vector<int> unit_of_;               // by parameter
  std::vector<WeakNodePtr> accumulators_;  // by parameter, or expired
  std::vector<UnitParams> units_;
  int lost_ = -1;
  int converted_ = -1;
  std::vector<std::span<std::byte>> early_;  // attached before bind(), by unit
};

}  // namespace strata::torch
