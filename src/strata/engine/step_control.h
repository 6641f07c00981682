// The meaning of a training script's backward() and step(): which micro-step is a boundary, by
// which factor the loss is multiplied, and when the loss scale and the learning rates change.
// Drives an Engine as a Config says. Threads: one thread at a time. Ownership: borrows the engine.
// Errors: UsageError for calls out of order, LossScaleError, and those of Engine::step().
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/schedule/loss_scaler.h"

namespace strata::engine {

// The engine's options for a configuration. `world_size` completes the settings that depend on it.
// `weights`: the dtype that turns numbers of elements into bytes where the configuration leaves
// parameters their own dtypes.
EngineOptions engine_options_from(const Config& config, DType weights = DType::kFloat32);

class StepControl {
 public:
  // `config.batch` must be complete.
  StepControl(Engine& engine, const Config& config);

  // The factor of the loss before autograd runs: the loss scale, divided by the accumulation steps
  // with `scale_by_accumulation`.
  double loss_factor(bool scale_by_accumulation) const {
    const double accumulation =
        scale_by_accumulation ? static_cast<double>(accumulation_steps_) : 1.0;
    return scaler_.scale() / accumulation;
  }

  // Whether the next step() updates the weights: at every accumulation_steps-th micro-step, or as
  // set. If the caller counts (managed_gradient_accumulation: false), every step() does, and it is
  // not known which backward pass is the last: ends_step() is true, at_boundary() false.
  bool ends_step() const { return !counts_ || at_boundary(); }
  bool at_boundary() const {
    if (!counts_) return false;
    return boundary_.value_or((micro_steps_ + 1 - counted_from_) % accumulation_steps_ == 0);
  }
  // Overrides the count, until called with nullopt. UsageError where the caller counts.
  void set_boundary(std::optional<bool> boundary);
  // Inside no_sync, gradients stay on the rank and are not reduced.
  void set_synchronise(bool synchronise) { synchronise_ = synchronise; }

  // `groups`: the step's, for strata.update_at: "backward".
  void begin_backward(std::span<const GroupScalars> groups = {}) {
    engine_.begin_backward(at_boundary(), synchronise_, groups);
  }
  void end_backward() {
    engine_.end_backward();
    ++passes_;
  }
  void abandon_backward() noexcept {  // Engine's
    engine_.abandon_backward();
  }
  // Collective, between backward and step: GradientCheck::read().
  void read_gradients(int unit, const WholeGradients::Take& take);

  // Ends a micro-step; at a boundary updates the weights (collective). nullopt: not a boundary.
  std::optional<StepResult> step(std::span<const GroupScalars> groups);

  // The state that a checkpoint holds. Setting it begins a step.
  struct State {
    std::int64_t micro_steps = 0;
    // Passes whose samples this rank has trained on: micro-steps or, if the caller counts, backward
    // passes before a step().
    std::int64_t micro_batches = 0;
    std::int64_t global_steps = 0;
    std::int64_t skipped_steps = 0;
    LossScaler::State loss_scale;
  };
  State state() const {
    return {micro_steps_, micro_batches_, global_steps_, skipped_steps(), scaler_.state()};
  }
  void set_state(const State& state);

  std::int64_t micro_steps() const { return micro_steps_; }
  std::int64_t global_steps() const { return global_steps_; }  // boundaries, applied or skipped
  // Boundaries; `wait` as for GradientCheck::skipped_steps().
  std::int64_t skipped_steps(bool wait = true) const {
    return engine_.gradient_check().skipped_steps(wait);
  }
  // Whether the last boundary changed the weights; waits for the device if need be, as grad_norm().
  bool last_step_applied() const {
    return global_steps_ > 0 && engine_.gradient_check().last_applied();
  }
  std::int64_t accumulation_steps() const { return accumulation_steps_; }
  // Sets the number of accumulation steps from here on; between steps.
  void set_accumulation_steps(std::int64_t steps);
  const LossScaler& loss_scaler() const { return scaler_; }
  LossScaler& loss_scaler() { return scaler_; }
  std::optional<double> grad_norm() const {
    return global_steps_ > 0 ? std::optional(engine_.gradient_check().last_norm()) : std::nullopt;
  }

 private:
  Engine& engine_;
  LossScaler scaler_;
  bool half_precision_;  // fp16: overflow is expected now and then
  std::int64_t accumulation_steps_;
  std::int64_t counted_from_ = 0;  // micro-steps when that number began to hold
  bool counts_;                    // micro-steps; false: every step() is a boundary
  std::optional<bool> boundary_;
  bool synchronise_ = true;
  std::int64_t micro_steps_ = 0;
  std::int64_t micro_batches_ = 0;
  std::int64_t passes_ = 0;  // backward, since the last step()
  std::int64_t global_steps_ = 0;
};

}  // namespace strata::engine
