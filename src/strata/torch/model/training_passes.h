// The passes of training: forward, backward and step of one model, in their order, with the hooks
// in autograd that bring weights and take gradients.
//
// A backward pass is either told (begin_backward() to end_backward(), around autograd's run), or
// autograd runs alone and the pass is found (AutogradPass). A found pass has the same effect as one
// that is told: its gradients are divided by the accumulation steps as they come, unless the graph
// belongs to a loss that another engine has divided, and brought from the scale of the loss to this
// engine's own. In fp16 the loss must come from scale(), of any engine. A found pass within the
// root's forward (a loss that differentiates its own parts) keeps its gradients on the rank for the
// pass that follows.
//
// A loss need not come from the root's forward: that of parts of the model, or of its parameters
// alone, is as good. Told of one that gives no parameter a gradient, without such a forward before,
// end_backward() throws UsageError: it is another model's.
//
// A pass that fails is abandoned; the error that ended it is its caller's. What fails while it is
// abandoned is kept, and thrown by the next call: the engine is in no state to go on then.
//
// Threads: one thread at a time, autograd's threads while the caller waits for backward.
// Ownership: borrows the engine and the parameters. Errors: UsageError for calls out of order, and
// those of the engine.
#pragma once

#include <optional>
#include <span>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/torch/model/autograd_pass.h"
#include "strata/torch/model/frozen_parameters.h"
#include "strata/torch/model/gradient_hooks.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/parameter_gradients.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/scopes.h"

namespace strata::torch {

class TrainingPasses {
 public:
  // `parameters` are at their full shape (ParameterSet::bind). `config.batch` must be complete.
  TrainingPasses(engine::Engine& engine, const ParameterSet& parameters, const PlannedModel& model,
                 const engine::Config& config);

  Scopes& scopes() { return scopes_; }
  engine::StepControl& control() { return control_; }

  void begin_forward();
  // Around the root's forward, however it was called: what was not begun begins here, where
  // autograd records. leave_root() in any case, without outputs where the forward threw.
  void enter_root();
  void leave_root(std::span<const at::Tensor> outputs);
  // What begin_backward() or a parking has taken back, if there is anything.
  void show_gradients();

  void begin_backward();
  void end_backward();
  // After any failure since begin_backward(); ends what it has begun.
  void abandon_backward() noexcept;
  // The loss from which autograd may run alone: times the loss scale in fp16, else itself.
  at::Tensor scale(const at::Tensor& loss);
  // What to run autograd from between begin_backward() and end_backward(): the loss, scaled, and
  // divided by the accumulation steps if `by_accumulation`.
  at::Tensor factored(const at::Tensor& loss, bool by_accumulation);

  FrozenParameters& frozen() { return frozen_; }
  // take(), begin_take() and end_take().
  GradientHooks& gradients() { return hooks_; }
  // What `.grad` is.
  ParameterGradients& shown_gradients() { return shown_; }
  // Drops the gradients of the step so far, on this rank; with `keep` they are zeroes. Between
  // passes.
  void zero_gradients(bool keep);

  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);

  // Between passes: lets go of what was gathered for reads outside scopes, but for what the graph
  // of a forward may have saved.
  void let_go();
  // let_go(), and frees the memory of all that nobody holds. Collective where gathers are.
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
  // No forward of the root came before the pass that runs: it has to prove that it is this model's.
  bool unforeseen_ = false;
};

}  // namespace strata::torch
