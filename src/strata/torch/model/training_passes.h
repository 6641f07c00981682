// The passes of training: forward, backward and step of one model, in their order, with the hooks
// in autograd that bring weights and take gradients.
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
#include "strata/torch/model/gradient_hooks.h"
#include "strata/torch/model/model_plan.h"
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
  void begin_backward();
  void end_backward();
  // After any failure since begin_backward(); ends what it has begun.
  void abandon_backward() noexcept;
  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);

 private:
  engine::Engine& engine_;
  GradientHooks hooks_;
  Scopes scopes_;
  engine::StepControl control_;
};

}  // namespace strata::torch
