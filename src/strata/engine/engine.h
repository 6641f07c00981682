// The engine: one rank's part of a sharded model, from the values of its shards to the next step. A
// facade over Weights, Gatherer, Reducer and ShardedOptimizer; it holds the order in which these
// are called, and the rules about it, and nothing else. Torch-free: whoever drives it
// (strata_torch, or a test) tells it when a scope needs its units, hands it gradients as they
// appear, and is told where parameters lie (ParameterViews).
//
// One step:  begin_forward, acquire/release ..., begin_backward, acquire/release, add_gradient ...,
//            end_backward, [more micro-steps], step.
// Threads: one thread at a time; a rank's forward and backward may be different threads as long as
// one waits for the other. Every method marked collective must be called by all ranks, in the same
// order. Errors: UsageError for calls out of order; CommError from peers; NumericsError for
// gradients that are not finite.
//
// What an error in step() leaves. Before the update begins (gradients that are not finite, units
// still in use, calls out of order): weights as they were. Within the update: weights and optimizer
// states that are partly those of the step before, on every rank. Every rank throws then, and from
// there on every call that trains or saves throws UsageError with the cause, until the weights were
// loaded (weights_changed()); the optimizer's states stay as they are. On a device that runs ahead
// step() does not wait for the norm: gradients that are not finite leave the weights unchanged
// there, too, and the next step() throws.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/first_error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/optimize/update_rule.h"
#include "strata/engine/pass_state.h"
#include "strata/engine/record/init_report.h"
#include "strata/engine/record/links.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/record/step_report.h"
#include "strata/engine/record/step_trace.h"
#include "strata/engine/reduce/gradient_check.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/state_parking.h"
#include "strata/engine/unfreezing.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/weights.h"
#include "strata/engine/weight_update.h"

namespace strata::engine {

struct StepResult {
  // False: skipped, because gradients were not finite. Where the norm is absent that is not known
  // yet (Engine::last_step_applied()).
  bool applied = false;
  // Global L2 norm before clipping, without loss scale; infinite where gradients are not finite.
  // Absent: not computed yet (Engine::grad_norm()).
  std::optional<double> grad_norm = 0.0;
  std::string warning = {};  // what the user is to be told, the same on every rank; empty: nothing
};

class Engine {
 public:
  // Collective. Throws ConfigError, on every rank, when ranks bring different models or `settings`
  // (the canonical text of the configuration); it names the first difference and who has it.
  Engine(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
         EngineOptions options, UpdateRule optimizer, const std::string& settings,
         std::shared_ptr<comm::Collectives> collectives, std::shared_ptr<device::Device> device,
         Stores stores, ParameterViews& views);
  ~Engine();

  // --- values ---
  Weights& weights() { return weights_; }
  InitReport& init_report() { return init_report_; }
  // Collective: call when store() has been called for every parameter, on every rank.
  // `complete`: every rank has written the units that stay whole in full, so nothing is gathered.
  void weights_changed(bool complete = false);
  // Collective: every rank has called store() for all of these units, which stay whole, and will
  // not again; they come from all ranks beside what follows. weights_changed() ends it.
  void gather_early(std::span<const int> units);
  // Takes all memory that the engine keeps: what is still missing of the weights, and the states of
  // the optimizer. Done by the first step otherwise.
  void prepare();
  // Takes what the unit's flat buffer holds now for `params` as their new values. Not a collective:
  // every rank's flat buffer must hold the same. Follow with weights_changed().
  void adopt_flat(std::span<const int> params);
  // `cause` ended the storing of values: nothing trains or saves before weights_changed().
  void loading_failed(std::string_view cause) { pass_.fail_loading(cause); }
  // Throws UsageError where an update, or loading, has failed half-way and nothing was loaded
  // since.
  void require_intact_weights() const { pass_.require_intact_weights(); }
  StateParking& parking() { return parking_; }      // lends the memory of states for a while
  Unfreezing& unfreezing() { return unfreezing_; }  // after settle_step()

  // --- the pass ---
  Gatherer& gatherer() { return gatherer_; }
  void begin_forward();
  bool forward_seen() const { return pass_.forward_seen(); }
  // `boundary`: a step follows. `synchronise`: false keeps the gradients on this rank for a later
  // pass.
  void begin_backward(bool boundary, bool synchronise = true);
  bool in_backward() const { return pass_.in_backward(); }
  // `owner` of the gradient, which may be read until it is let go; null: until this returns, in the
  // order of the compute stream.
  void add_gradient(int param, const std::byte* gradient, DType dtype,
                    std::shared_ptr<const void> owner = nullptr);
  Reducer& reducer() { return reducer_; }  // for its begin_add() and end_add()
  void end_backward();
  // After a backward pass: the next one needs a forward of its own. Until then a graph may be run
  // again.
  void end_micro_step();
  // A backward pass failed: drops the step's gradients, so that a new forward may follow. What
  // fails on the way (a device that is lost) hides no cause of the failure: the first such error is
  // thrown by the next call that trains.
  void abandon_backward() noexcept;

  // --- the step --- collective
  StepResult step(std::span<const GroupScalars> groups, double loss_scale, bool skip_on_overflow);
  // Both are the last step's, and wait for the device where it has not computed them yet.
  double grad_norm() { return check_.last_norm(); }
  bool last_step_applied() { return check_.last_applied(); }
  double known_grad_norm() const { return check_.known_norm(); }  // of a step that the host knows
  // All steps that were skipped. `wait`: for the device; else the last one may be missing.
  std::int64_t skipped_steps(bool wait) { return check_.skipped_steps(wait); }
  void set_skipped_steps(std::int64_t steps) { check_.set_skipped_steps(steps); }
  // Has the optimizer forget the last step where the device skipped it. Throws what that left.
  void settle_step();
  void zero_gradients();  // drops this rank's of the step so far, which may follow all the same
  void forget_step() {    // the step so far does not count: another one begins
    reducer_.drop_gradients();
    pass_.drop_gradients();
  }
  GradientCheck& gradient_check() { return check_; }

  // --- what steps did ---
  StepRecorder& recorder() { return recorder_; }
  // The last step's; nullopt before the first is over. With `wait` the host waits until the device
  // has finished that step; else the report is of the last one that it has finished. With `wait`
  // and where something is offloaded, the first call measures the limits of the links.
  std::optional<StepReport> step_report(bool wait = true) {
    return make_step_report(recorder_, wait, collectives_->shard_place().held_count(), &links_);
  }
  const StepTrace& trace() const { return trace_; }
  void end_trace() noexcept { trace_.end(recorder_, *collectives_); }

  ShardedOptimizer* optimizer() { return optimizer_.get(); }
  OptimizerShards& shards() { return shards_; }
  comm::Collectives& collectives() { return *collectives_; }
  device::Device& device() { return *device_; }
  const EngineOptions& options() const { return options_; }

 private:
  void require_usable();
  void update_weights(std::span<const GroupScalars> groups, const GradientScale& scale);

  EngineOptions options_;
  std::shared_ptr<comm::Collectives> collectives_;
  std::shared_ptr<device::Device> device_;
  Stores stores_;
  InitReport init_report_;
  Weights weights_;
  StepRecorder recorder_;
  Links links_;
  StepTrace trace_;
  Gatherer gatherer_;
  Reducer reducer_;
  GradientCheck check_;
  OptimizerShards shards_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  WeightUpdate update_;
  PassState pass_;
  Unfreezing unfreezing_;
  StateParking parking_;
  FirstError abandoned_;  // of abandon_backward(), until it is thrown
};

}  // namespace strata::engine
