// One rank's part of a sharded model: a facade over Weights, Gatherer, Reducer and
// ShardedOptimizer, with the rules about the order of their calls. Torch-free: its caller
// (strata_torch, or a test) reports when a scope needs its units, and hands over gradients as they
// appear. The engine reports where parameters lie (ParameterViews).
//
// One step:  begin_forward, acquire/release ..., begin_backward, acquire/release, add_gradient ...,
//            end_backward, [more micro-steps], step.
// Threads: one thread at a time; a rank's forward and backward may be different threads as long as
// one waits for the other. All ranks must call each method marked collective, in the same order.
// Errors: UsageError for calls out of order; CommError from peers; NumericsError for gradients that
// are not finite.
//
// An error in step() before the update (gradients that are not finite, units still in use, calls
// out of order) leaves the weights unchanged. If the update fails half-way, every rank throws, and
// weights and optimizer states are partly those of the step before. Then every call that trains or
// saves throws UsageError with the cause, until the weights were loaded (weights_changed()); that
// does not restore the optimizer's states. On a device that runs ahead, step() does not wait for
// the norm: gradients that are not finite leave the weights unchanged, and the next step() throws.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/pass_state.h"
#include "strata/engine/record/init_report.h"
#include "strata/engine/record/links.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/record/step_trace.h"
#include "strata/engine/reduce/gradient_check.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/state_offload.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/weights.h"
#include "strata/engine/weight_update.h"

namespace strata::engine {

struct StepResult {
  // False: the step was skipped, because gradients were not finite. If the norm is absent, that is
  // not known yet (GradientCheck::last_applied()).
  bool applied = false;
  // Global L2 norm before clipping, without loss scale; infinite where gradients are not finite.
  // Absent: not computed yet (GradientCheck::last_norm()).
  std::optional<double> grad_norm = 0.0;
  std::string warning = {};  // for the user, the same on every rank; empty: none
};

class Engine {
 public:
  // Collective. Throws ConfigError, on every rank, when ranks bring different models or `settings`
  // (the canonical text of the configuration); it names the first difference and its ranks.
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
  // Collective. Every rank has called store() for the last time for all of these units, which stay
  // whole. Their all-gather runs beside later calls; weights_changed() ends it.
  void gather_early(std::span<const int> units) {
    collectives_->group_barrier();  // every rank's shards are written before any rank reads them
    gatherer_.fetch_first(units);
  }
  // Takes all memory that the engine keeps: the missing part of the weights' memory, and the states
  // of the optimizer. Otherwise the first step does so.
  void prepare();
  // Takes the values of `params` in their units' flat buffers as their new values. Not a
  // collective: every rank's flat buffer must hold the same. Follow with weights_changed().
  void adopt_flat(std::span<const int> params);
  // `cause` ended the storing of values: no call trains or saves before weights_changed().
  void loading_failed(std::string_view cause) { pass_.fail_loading(cause); }
  // Throws UsageError if weights are of two steps: an update or a load failed, or step() is to
  // come.
  void require_intact_weights() const {
    reducer_.require_none_early();
    pass_.require_intact_weights();
  }
  StateOffload& state_offload() { return state_offload_; }
  // After finish_step(): trains parameters that were frozen.
  void train_frozen(std::span<const int> params) {
    engine::train_frozen(params, weights_, reducer_, shards_, optimizer_.get(), *collectives_);
  }

  // --- the pass ---
  Gatherer& gatherer() { return gatherer_; }
  void begin_forward();
  bool forward_seen() const { return pass_.forward_seen(); }
  std::int64_t backward_passes() const { return pass_.backward_passes(); }
  // `boundary`: a step follows. `synchronise`: false keeps the gradients on this rank for a later
  // pass. `groups`: the step's, if EngineOptions::update_in_backward; none: step() updates.
  void begin_backward(bool boundary, bool synchronise = true,
                      std::span<const GroupScalars> groups = {});
  bool in_backward() const { return pass_.in_backward(); }
  // The gradient may be read until `owner` is let go. If `owner` is null, it may be read until this
  // returns, in the order of the compute stream.
  void add_gradient(int param, const std::byte* gradient, DType dtype,
                    std::shared_ptr<const void> owner = nullptr);
  Reducer& reducer() { return reducer_; }  // for its begin_add() and end_add()
  void end_backward();
  // After a backward pass: the next one needs a forward of its own. Before this call a graph may
  // run backward again.
  void end_micro_step() {
    require_usable();
    pass_.end_micro_step();
  }
  // A backward pass failed: drops the step's gradients, so that a new forward may follow. Errors on
  // the way (of a lost device) do not hide the cause of the failure: the next call that trains
  // throws the first of them.
  void abandon_backward() noexcept;

  // --- the step --- collective
  StepResult step(std::span<const GroupScalars> groups, double loss_scale, bool skip_on_overflow);
  // Makes the optimizer forget the last step if the device skipped it. Throws that step's error.
  void finish_step();
  void zero_gradients();  // drops this rank's of the step so far, which may follow all the same
  void forget_step() {    // the step so far does not count: another one begins
    reducer_.drop_gradients();
    pass_.drop_gradients();
    update_.forget_early();
  }
  GradientCheck& gradient_check() { return check_; }  // norm and outcome of the last step

  // --- what steps did ---
  StepRecorder& recorder() { return recorder_; }
  // The report of the last step that the device has finished; nullopt before the first one. With
  // `wait` the host waits for the last step and, if something is offloaded, measures the limits of
  // the links in the first call.
  std::optional<StepReport> step_report(bool wait = true);
  const StepTrace& trace() const { return trace_; }
  void end_trace() noexcept { trace_.end(recorder_, *collectives_); }

  // Any thread, until the engine's end: ShardedOptimizer::give_back_memory().
  bool give_back_memory() { return optimizer_ != nullptr && optimizer_->give_back_memory(); }

  ShardedOptimizer* optimizer() { return optimizer_.get(); }
  OptimizerShards& shards() { return shards_; }
  comm::Collectives& collectives() { return *collectives_; }
  device::Device& device() { return *device_; }
  const EngineOptions& options() const { return options_; }

 private:
  void require_updated(bool waits);
  void await_updates();
  void require_usable() {
    require_updated(/*waits=*/false);
    pass_.require_intact_weights();
    abandoned_.rethrow_once();
  }
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
  PassState pass_;
  StateOffload state_offload_;
  WeightUpdate update_{*this};
  FirstError abandoned_;  // of abandon_backward(), until it is thrown
};

}  // namespace strata::engine
