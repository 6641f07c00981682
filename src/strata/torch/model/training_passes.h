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

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/torch/model/gradient_hooks.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/parameter_gradients.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/scopes.h"

namespace strata::torch {

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

  void begin_backward();
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
