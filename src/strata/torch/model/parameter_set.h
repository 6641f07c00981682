// The model's parameters as torch sees them, pointed at the engine's memory.
//
// Each parameter has a torch storage (ParameterStorage). Gathering gives it memory, releasing takes
// the memory away, so views that autograd saved (weight.t() and the like) stay valid at the next
// gather, at whatever address. A gathered parameter is a view of its full shape; a released one is
// empty, shape [0], as frameworks made for sharded training expect. The user's tensor object never
// changes.
//
// Views that a script holds (a state dict, p.detach(), p.numpy()) keep their values when the unit
// goes: held(), leave(). While a graph that needs it is pending, they cannot be told from what
// autograd saved; then reading one is torch's RuntimeError until the next gather, but after
// keep_views().
//
// A unit that stays whole may be refreshed beside the next forward: its parameters are awaited
// (AwaitedStorage) until its attach(), unless somebody holds a view of its memory: such a reader
// could not be made to wait.
//
// A script may give its tensor object other memory (`p.data = t`, `p.set_(t)`). Nobody tells us, so
// who depends on it asks: replaced(). Where the next attach() or detach() comes first, that is kept
// for lost(), but for what brings no values: an empty tensor in place of a released parameter, or
// the same values in another dtype, as module.to(dtype) leaves them (converted()). torch gives such
// a tensor a new AccumulateGrad node where its kind has changed; put_back() gives it the node back
// that settle() saw, with the hooks on it.
//
// Threads: one thread at a time (autograd's backward thread counts while the caller waits for it),
// but for readers of awaited parameters and await_no_more().
// Ownership: shares the user's tensors until unbind(); the memory behind them belongs to the
// engine, or to views after leave(), so after the engine is gone released parameters stay empty
// until new data is set.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weights.h"
#include "strata/torch/model/parameter_storage.h"

namespace strata::torch {

class ParameterSet final : public engine::ParameterViews {
 public:
  // `variables`: by parameter index; anywhere until bind(). `place`: of the engine's memory, which
  // `device` must outlive where views keep it.
  ParameterSet(std::vector<at::Tensor> variables, c10::Device place,
               std::shared_ptr<void> device = nullptr);

  // Makes storages and views for the engine's layout and points every parameter at its full shape,
  // still without memory: the moment to make autograd nodes, which record that shape. Until then
  // attach() only remembers, so that the parameters' own values can be read first.
  void bind(const engine::Weights& weights);
  // After bind() and when autograd's nodes are made: attaches the units that have memory and
  // releases the others.
  void settle();
  // Points every parameter at memory of its own again, with the values that `full` gives, or leaves
  // it empty where that is undefined or `full` has nothing at all. Forgets the parameters then.
  // Nothing before bind().
  void unbind(std::span<const at::Tensor> full = {});

  // Whether a graph that is still to be run needs the unit; null: none does.
  void on_graphs(std::function<bool(int unit)> pending) { pending_ = std::move(pending); }
  // Who is asked for the values of a unit that are awaited. Until then none are.
  void on_wanted(std::function<void(int unit)> complete) { complete_ = std::move(complete); }
  // From now on units are complete before their parameters point at them. Any thread.
  void await_no_more() { may_await_ = false; }
  // Before what completes awaited values goes: nobody is asked for them any more.
  void forget_awaited();

  void attach(int unit, std::span<std::byte> flat) override;
  void detach(int unit) override;
  bool held(int unit) const override {
    if (units_.empty() || others(unit) == 0) return false;
    const bool pending = pending_ && pending_(unit);
    return units_[static_cast<std::size_t>(unit)].keeps_views || !pending;
  }
  // Its views that there are keep their values, also while a graph is pending.
  void keep_views(int unit) { units_[static_cast<std::size_t>(unit)].keeps_views = true; }
  void leave(int unit, std::shared_ptr<void> memory) override;
  bool await(int unit) override;

  const at::Tensor& variable(int param) const {
    return variables_[static_cast<std::size_t>(param)];
  }
  // The full-shape view; its storage has memory while the unit is gathered.
  const at::Tensor& full_view(int param) const { return storage_of(param).view(); }
  // Tensors beside the user's parameters and ours that share this unit's memory.
  std::size_t others(int unit) const;
  // Whether a tensor that is neither the user's parameter nor ours has to do with this sharded
  // unit's memory: a view of it, or what autograd saved. It may say yes in vain.
  bool held_elsewhere(int unit) const;
  bool replaced(int param) const;  // whether the user's tensor has other memory than its own
  // The first that is, and whose values are not those of the unit to the bit; -1: none. Others are
  // put back. Only a tensor that is replaced is looked at, and the host waits for its values.
  int find_changed();
  // A parameter whose replaced memory is lost, since its unit came or went meanwhile; -1: none.
  int lost() const { return lost_; }
  // One that had been given no values, or its own, in another dtype or memory format, and is back;
  // -1: none since the last call.
  int take_converted() { return std::exchange(converted_, -1); }
  // Copies the values that a replaced tensor has into its gathered unit: of its shape, any dtype.
  void take_in(int param);
  // Points the user's tensor at the unit's memory again, and gradients at their node; what is lost
  // of it is forgotten.
  void put_back(int param);
  // By tensor identity; -1: none of these.
  int index_of(const at::Tensor& variable) const;
  int size() const { return static_cast<int>(variables_.size()); }
  c10::Device place() const { return place_; }

 private:
  enum class Pointed { kAtNothing, kAtUnit, kAtAwaited };
  struct UnitParams {
    std::vector<int> params;
    Pointed pointed = Pointed::kAtUnit;  // where bind() leaves them
    bool keeps_views = false;            // until the unit goes
  };

  ParameterStorage& storage_of(int param) { return storages_[static_cast<std::size_t>(param)]; }
  const ParameterStorage& storage_of(int param) const {
    return storages_[static_cast<std::size_t>(param)];
  }
  const UnitParams& unit_of(int param) const {
    return units_[static_cast<std::size_t>(unit_of_[static_cast<std::size_t>(param)])];
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
  std::vector<int> unit_of_;                                          // by parameter
  std::vector<std::weak_ptr<::torch::autograd::Node>> accumulators_;  // by parameter, or expired
  std::vector<UnitParams> units_;
  int lost_ = -1;
  int converted_ = -1;
  std::vector<std::span<std::byte>> early_;  // attached before bind(), by unit
};

}  // namespace strata::torch
