// The passes of training: forward, backward and step of one model, in their order. Hooks in
// autograd gather the weights and take the gradients.
//
// The engine drives a backward pass (begin_backward() to end_backward(), around autograd's pass),
// or the script runs autograd alone and AutogradPass finds the pass. A found pass has the same
// effect. Its gradients are divided by the accumulation steps as they come, unless another engine
// has divided the loss, and converted from the scale of the loss to this engine's own. In fp16 the
// loss must come from scale(), of any engine. A found pass within the root's forward (a loss that
// differentiates its own parts) keeps its gradients on the rank for the pass that follows.
//
// A loss need not come from the root's forward: it may come from parts of the model, or from its
// parameters alone. If no such forward came before and the driven pass gives no parameter a
// gradient, end_backward() throws UsageError: the loss belongs to another model.
//
// A pass that fails is abandoned, and its caller gets the error. Errors while it is abandoned are
// kept, and thrown by the next call, because the engine cannot continue then.
//
// Threads: one thread at a time, autograd's threads while the caller waits for backward.
// Ownership: borrows the engine and the parameters. Errors: UsageError for calls out of order, and
// those of the engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/model/gradient_hooks.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/parameter_storage.h"
#include "strata/torch/model/scopes.h"
#include "strata/torch/model/value_access.h"

namespace strata::torch {

// `p.grad` as scripts see it between backward and step, for parameters whose gradients the engine
// holds. It is there after each backward pass, in the parameter's shape and dtype, summed and
// averaged over ranks as step() will use it (under fp16 times the loss scale). Scripts may change
// it by operators, or assign another tensor or None; step() uses the result.
//
// show() assigns a tensor without values (PendingStorage), so a script that does not look pays for
// no gather and no memory. The first operator on one fetches the values: on one rank those of its
// unit, on several those of all units, for which a rank that does not read takes part in its step()
// (GradientCheck::read()). At stage 3 on several ranks it throws UsageError, which names the call
// to use instead.
//
// take_back() hands each result to the engine. Elements that a script did not change keep their
// fp32 values, whatever dtype the script saw. If the script set `.grad` to None or called a
// parameter's zero_grad(), the parameter's gradient is dropped on this rank. If all are dropped,
// the rest of the step's gradients on this rank is dropped with them.
//
// Threads: the one that trains, autograd's while it waits. Ownership: borrows the engine. Scripts
// may keep the tensors; those that were never read throw once their step is over. Errors:
// UsageError; those of the engine.
class ParameterGradients : NonCopyable {
 public:
  ParameterGradients(engine::Engine& engine, engine::StepControl& control,
                     const ParameterSet& parameters)
      : engine_(engine),
        control_(control),
        parameters_(parameters),
        index_of_(static_cast<std::size_t>(parameters.size()), -1) {
    if (!PendingStorage::available()) return;
    for (const engine::Unit& unit : engine.weights().units()) {
      if (!unit.trainable() || unit.spec.tile()) continue;
      for (const plan::Slot& slot : unit.layout.slots()) {
        if (slot.numel == Numel()) continue;
        engine::nth(index_of_, slot.param) = static_cast<int>(shown_.size());
        const plan::ParamSpec& spec = engine.weights().param(slot.param);
        shown_.push_back(
            {.params = {slot.param}, .shape = spec.shape, .channels_last = spec.channels_last});
      }
    }
  }
  ~ParameterGradients() { hide(); }

  // Adds a parameter that the engine holds in tiles. Its gradient cannot be read: an operator on it
  // throws UsageError. Assigning None, and zero_(), apply to all of its tiles.
  void add_tiled(const at::Tensor& whole, const std::vector<std::int64_t>& shape,
                 const std::vector<int>& tiles) {
    if (!PendingStorage::available() || !engine_.weights().unit_of(tiles.front()).trainable())
      return;
    shown_.push_back({.params = tiles, .whole = whole, .shape = shape});
  }
  // After a backward pass.
  void show() {
    for (std::size_t i = 0; i < shown_.size(); ++i) {
      Shown& shown = shown_[i];
      if (!shows(shown)) continue;
      if (!shown.tensor.defined()) make(i);
      grad_of(shown) = shown.tensor;
      shown.look = Look::kUnread;
    }
  }
  // Hands the scripts' changes to the engine, and keeps the gradients visible.
  void apply() {
    if (all_are_gone()) {
      engine_.zero_gradients();
      hide();
      return;
    }
    const at::NoGradGuard no_grad;
    for (Shown& shown : shown_) apply(shown);
  }
  // apply(), then hides the gradients. Called before a backward pass and before a step.
  void take_back() {
    apply();
    hide();
  }
  // Hides the gradients and ignores the scripts' changes.
  void hide() {
    for (Shown& shown : shown_) {
      at::Tensor& grad = grad_of(shown);
      if (grad.defined()) grad.reset();
      const Look look = std::exchange(shown.look, Look::kHidden);
      if (!shown.tensor.defined()) continue;
      // The engine's own references: the tensor, and its storage.
      const bool untouched = look != Look::kRead && shown.storage.use_count() == 2 &&
                             ::torch::autograd::impl::is_tensor_stealable(shown.tensor);
      if (untouched) continue;
      shown.storage->forget([name = name_of(shown)] {
        throw UsageError(
            "'{}'.grad was kept without its values, and its step is over; read it between backward "
            "and step(), by p.grad.clone() say",
            name);
      });
      if (look == Look::kRead) shown.storage->forget();
      shown.tensor.reset();
      shown.storage.reset();
      shown.values.reset();
    }
  }

 private:
  static constexpr const char* kUnreadAddress =
      "the address of a gradient was asked for before its values were read; read it with an "
      "operator of torch first (p.grad.clone(), say), which brings its values";

  enum class Look { kHidden, kUnread, kZeroed, kRead };
  struct Shown {
    std::vector<int> params;  // one, or the tiles of one
    at::Tensor whole = {};    // of tiles: the script's parameter
    std::vector<std::int64_t> shape = {};
    bool channels_last = false;  // of the parameter, and of its gradient
    at::Tensor tensor = {};      // the present or former `.grad`; undefined: none yet
    c10::intrusive_ptr<c10::StorageImpl> values = {};
    c10::intrusive_ptr<PendingStorage> storage = {};
    Look look = Look::kHidden;
  };

  // All ranks must show the same gradients, and no rank knows whether others have one.
  bool shows(const Shown& shown) const {
    if (!variable_of(shown).requires_grad()) return false;
    const engine::GradientRecord& record = engine_.reducer().record();
    return engine_.collectives().world_size() > 1 ||
           std::ranges::any_of(shown.params, [&](int param) { return record.got(param); });
  }
  const std::string& name_of(const Shown& shown) const {
    return engine_.weights().param(shown.params.front()).known_name();
  }
  bool all_are_gone() const {
    bool any = false;
    for (const Shown& shown : shown_) {
      if (grad_of(shown).defined()) return false;
      any = any || shown.look != Look::kHidden;
    }
    return any;
  }
  void make(std::size_t index) {
    Shown& shown = shown_[index];
    const DType dtype = engine_.weights().param(shown.params.front()).dtype;
    shown.values = bare_storage(parameters_.place(), 0);
    shown.storage = c10::make_intrusive<PendingStorage>(
        shown.values, [this, index] { read(shown_[index]); }, kUnreadAddress);
    shown.storage->on_zero([this, index] {
      if (shown_[index].look == Look::kRead) return false;
      shown_[index].look = Look::kZeroed;
      return true;
    });
    const at::Tensor view = tensor_in(shown.values, to_scalar_type(dtype), shown.shape,
                                      dense_strides(shown.shape, shown.channels_last));
    shown.storage->set_nbytes(bytes_of(Numel(view.numel()), dtype).size());
    shown.tensor = PendingStorage::view(shown.storage, view);
  }
  void read(Shown& shown) {
    if (shown.look == Look::kRead) return;
    const at::NoGradGuard no_grad;
    const engine::Unit& unit = engine_.weights().unit_of(shown.params.front());
    if (shown.whole.defined()) refuse_tiled(name_of(shown));
    if (shown.look == Look::kUnread) {
      if (engine_.options().stage == 3 && engine_.collectives().world_size() > 1)
        refuse_sharded(name_of(shown));
      control_.read_gradients(
          unit.id, [this](const engine::Unit& of, const float* flat) { fill(of, flat); });
    }
    if (shown.look != Look::kRead) give(shown, nullptr);  // zeroes, or no gradient was reduced
  }
  void fill(const engine::Unit& unit, const float* flat) {
    for (const plan::Slot& slot : unit.layout.slots()) {
      const int index = engine::nth(index_of_, slot.param);
      if (index < 0) continue;
      Shown& shown = engine::nth(shown_, index);
      if (shown.look == Look::kUnread) give(shown, flat + slot.offset.size());
    }
  }
  // A gradient that the script has set to None gets values as well: the script may have kept the
  // tensor.
  void give(Shown& shown, const float* values) {
    const plan::ParamSpec& spec = engine_.weights().param(shown.params.front());
    const auto options =
        at::TensorOptions().dtype(to_scalar_type(spec.dtype)).device(parameters_.place());
    const std::int64_t numel = spec.numel().value;
    at::Tensor memory =
        values == nullptr ? at::zeros({numel}, options) : at::empty({numel}, options);
    if (values != nullptr) memory.copy_(tensor_over(values, numel, at::kFloat, memory.device()));
    shown.values->set_data_ptr_noswap(c10::InefficientStdFunctionContext::makeDataPtr(
        memory.mutable_data_ptr(), [memory](void*) {}, memory.device()));
    shown.values->set_nbytes(memory.nbytes());
    const bool zeroed = shown.look == Look::kZeroed;
    shown.look = Look::kRead;
    if (zeroed) drop(shown, /*came=*/true);
  }
  void apply(Shown& shown) {
    const at::Tensor& grad = grad_of(shown);
    if (!grad.defined()) {
      if (std::exchange(shown.look, Look::kHidden) != Look::kHidden) drop(shown, /*came=*/false);
      return;
    }
    if (shown.look != Look::kHidden && grad.is_same(shown.tensor)) {
      if (shown.look == Look::kZeroed) {
        drop(shown, /*came=*/true);
        shown.look = Look::kUnread;  // the engine has zeroes now
      }
      if (shown.look != Look::kRead) return;
    }
    take_values(shown, grad);
  }
  // Takes a gradient that was read, or that the script has assigned.
  void take_values(const Shown& shown, const at::Tensor& gradient) {
    const engine::Weights& weights = engine_.weights();
    const int param = shown.params.front();
    if (shown.whole.defined()) refuse_tiled(name_of(shown));
    if (gradient.layout() != at::kStrided || gradient.sizes() != at::IntArrayRef(shown.shape))
      throw UsageError(
          "'{}'.grad was set to a tensor that is no gradient of it; give a dense one of its shape "
          "[{}]",
          name_of(shown), fmt::join(shown.shape, ", "));
    const int unit = weights.unit_of(param).id;
    const int slot = weights.slot_index_of(param);
    const bool was_read = shown.look == Look::kRead && gradient.is_same(shown.tensor);
    engine::GradientShards& shards = engine_.reducer().shards();
    const auto [begin, end] = weights.owned_range(param);
    const std::int64_t count = (end - begin).value;
    if (count == 0) {
      if (!was_read) engine_.reducer().edits().store(unit, slot, nullptr);
      return;
    }
    at::Tensor mine =
        in_memory_order(gradient.detach().to(parameters_.place()), shown.channels_last)
            .reshape({-1})
            .narrow(0, begin.value, count);
    if (was_read) {
      const at::Tensor kept = shards.filled(unit)
                                  ? tensor_over(shards.values(unit).data() +
                                                    offset_in_shard(engine_, param, begin).size(),
                                                count, at::kFloat, parameters_.place())
                                  : at::zeros({count}, mine.options().dtype(at::kFloat));
      const at::Tensor same = kept.to(mine.scalar_type()).eq(mine);
      if (same.all().item<bool>()) return;
      mine = at::where(same, kept, mine.to(at::kFloat));
    }
    mine = mine.to(at::kFloat).contiguous();
    engine_.reducer().edits().store(unit, slot, mine.const_data_ptr<float>());
  }
  void drop(const Shown& shown, bool came) {
    const engine::Weights& weights = engine_.weights();
    for (const int param : shown.params)
      engine_.reducer().edits().drop(weights.unit_of(param).id, weights.slot_index_of(param), came);
  }
  [[noreturn]] static void refuse_sharded(const std::string& name) {
    throw UsageError(
        "'{}'.grad was read, and at ZeRO stage 3 no rank has a whole gradient; call "
        "strata.utils.safe_get_full_grad(p) on every rank for one parameter, "
        "engine.get_global_grad_norm() for the norm, and set gradient_clipping in the "
        "configuration in place of clip_grad_norm_()",
        name);
  }
  [[noreturn]] static void refuse_tiled(const std::string& name) {
    throw UsageError(
        "'{}'.grad was read or set, and the parameter is used in tiles, so that its gradient is "
        "never whole; call strata.utils.safe_get_full_grad(p) or safe_set_full_grad(p, value), "
        "which work on the host, engine.get_global_grad_norm() for the norm, and set "
        "gradient_clipping in the configuration in place of clip_grad_norm_()",
        name);
  }
  const at::Tensor& variable_of(const Shown& shown) const {
    return shown.whole.defined() ? shown.whole : parameters_.variable(shown.params.front());
  }
  at::Tensor& grad_of(const Shown& shown) const { return variable_of(shown).mutable_grad(); }

  engine::Engine& engine_;
  engine::StepControl& control_;
  const ParameterSet& parameters_;
  std::vector<Shown> shown_;   // trainable parameters that have elements
  std::vector<int> index_of_;  // by parameter: into shown_, or -1
};

// Frozen parameters that may become trainable: as soon as one is in a param group and requires a
// gradient, the engine makes room for it and trains it from that forward on.
// Errors: those of engine::train_frozen().
class FrozenParameters {
 public:
  FrozenParameters(engine::Engine& engine, const ParameterSet& parameters);

  // Adds parameters that are in no param group to this group; alike on every rank. UsageError for
  // one that is in a group.
  void add_to_group(std::span<const int> params, int group);
  // Called before a pass begins. Collective if a parameter was unfrozen, which all ranks must do
  // before the same pass.
  void train_unfrozen();
  // Collective: trains those of `params` that are frozen and in a group, whether or not they
  // require gradients yet.
  void train(std::span<const int> params);
  // Sets the function that is called with parameters that become trained.
  void on_trained(std::function<void(std::span<const int>)> told) { told_ = std::move(told); }

 private:
  engine::Engine& engine_;
  const ParameterSet& parameters_;
  std::vector<int> frozen_;  // those that the engine can train later, ascending
  std::function<void(std::span<const int>)> told_;
};

class TrainingPasses {
 public:
  // `parameters` are at their full shape (ParameterSet::bind). `config.batch` must be complete.
  TrainingPasses(engine::Engine& engine, const ParameterSet& parameters, const PlannedModel& model,
                 const engine::Config& config);

  Scopes& scopes() { return scopes_; }
  engine::StepControl& control() { return control_; }

  void begin_forward();
  // Around the root's forward, however the script called it. enter_root() begins the forward if
  // begin_forward() has not and autograd records. leave_root() gets no outputs if the forward
  // threw.
  void enter_root();
  void leave_root(std::span<const at::Tensor> outputs);
  // Shows the gradients again that begin_backward(), or offloading states, has taken back.
  void show_gradients();

  // `groups`: the coming step's, for strata.update_at: "backward".
  void begin_backward(std::span<const engine::GroupScalars> groups = {});
  void end_backward();
  // Called after any failure since begin_backward(); ends the pass.
  void abandon_backward() noexcept;
  // The loss from which a script may run autograd alone: `loss` times the loss scale in fp16, else
  // `loss`.
  at::Tensor scale(const at::Tensor& loss);
  // The tensor from which to run autograd within a driven pass: the loss, scaled, and divided by
  // the accumulation steps if `by_accumulation`.
  at::Tensor factored(const at::Tensor& loss, bool by_accumulation);

  FrozenParameters& frozen() { return frozen_; }
  // For take(), begin_take() and end_take().
  GradientHooks& gradients() { return hooks_; }
  // The gradients that `.grad` shows.
  ParameterGradients& shown_gradients() { return shown_; }
  // Drops the gradients of the step so far on this rank; `keep` sets them to zero instead. Only
  // between passes.
  void zero_gradients(bool keep);

  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);

  // Ends the holds of reads outside scopes, except on units that the graph of a forward may have
  // saved. Only between passes.
  void let_go();
  // let_go(), then frees the memory of all units without a hold. Collective where gathers are.
  void free_gathered();

 private:
  void end_forward(std::span<const at::Tensor> outputs);
  void begin_found();
  void end_found();

  engine::Engine& engine_;
  engine::StepControl control_;
  bool scales_loss_;  // fp16
  AutogradPass pass_;
  FrozenParameters frozen_;
  GradientHooks hooks_;
  ParameterGradients shown_;
  Scopes scopes_;
  bool begun_ = false;  // begin_forward() has been called for the root's next forward
  int in_root_ = 0;     // forwards of the root that have not returned
  bool keeps_ = false;  // the found pass that runs keeps its gradients on this rank
  // No forward of the root came before the running pass, so it must give a gradient of this model.
  bool unforeseen_ = false;
};

}  // namespace strata::torch
