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
// gradients that are not finite. After an error in step() the weights are unchanged and the step's
// gradients are dropped. On a device that runs ahead step() does not wait for the norm: gradients
// that are not finite leave the weights unchanged there, too, and the next step() throws.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/gather/gatherer.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/record/init_report.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/record/step_report.h"
#include "strata/engine/record/step_trace.h"
#include "strata/engine/reduce/gradient_norm.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

// Who updates the shards; decides what states are kept.
enum class UpdateRule { kNone, kAdam, kAdamW, kExternal };
// Whether the remainder of masters is enough for the rule where weights are bf16. An optimizer of
// the user's sees fp32 masters.
inline bool takes_remainders(UpdateRule rule) {
  return rule != UpdateRule::kExternal;
}

struct StepResult {
  bool applied = false;  // false: skipped, because 16-bit gradients overflowed
  // Global L2 norm before clipping, without loss scale; infinite on overflow. Absent: not computed
  // yet (Engine::grad_norm()).
  std::optional<double> grad_norm = 0.0;
};

class Engine {
 public:
  // Collective. Throws ConfigError, on every rank, when ranks bring different models or `settings`
  // (the canonical text of the configuration); it names the first difference and who has it.
  Engine(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
         EngineOptions options, UpdateRule optimizer, const std::string& settings,
         std::shared_ptr<comm::Collectives> collectives, std::shared_ptr<device::Device> device,
         std::shared_ptr<offload::StateStore> states, ParameterViews& views);
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

  // --- the pass ---
  Gatherer& gatherer() { return gatherer_; }
  void begin_forward();
  bool forward_seen() const { return forward_seen_; }
  // `boundary`: a step follows. `synchronise`: false keeps the gradients on this rank for a later
  // pass.
  void begin_backward(bool boundary, bool synchronise = true);
  bool in_backward() const { return in_backward_; }
  // `keep` owns the gradient, which may be read until it is let go; null: until this returns, in
  // the order of the compute stream.
  void add_gradient(int param, const std::byte* gradient, DType dtype,
                    std::shared_ptr<const void> keep = nullptr);
  void end_backward();
  // A backward pass after this one needs a forward of its own. Until then a graph may be run again.
  void end_micro_step();
  void abandon_backward();

  // --- the step --- collective
  StepResult step(std::span<const GroupScalars> groups, double loss_scale, bool skip_on_overflow);
  // Of the last step; waits for the device where it has not computed it yet.
  double grad_norm();
  // Throws what the last step has left to say.
  void settle_step();
  // Drops the gradients of the step so far.
  void zero_gradients();

  // --- what steps did ---
  StepRecorder& recorder() { return recorder_; }
  // Of the last step; nullopt before the first is over. `wait`: for the device to finish that step;
  // else of the last one that it has finished.
  std::optional<StepReport> step_report(bool wait = true) {
    return make_step_report(recorder_, wait, collectives_->shard_place().held_count());
  }
  const StepTrace& trace() const { return trace_; }
  // Writes the timeline of a run that is over before its last step. Not a collective.
  void end_trace() noexcept { trace_.end(recorder_, *collectives_); }

  ShardedOptimizer* optimizer() { return optimizer_.get(); }
  OptimizerShards& shards() { return shards_; }
  comm::Collectives& collectives() { return *collectives_; }
  device::Device& device() { return *device_; }
  const EngineOptions& options() const { return options_; }

 private:
  using Finding = GradientNorm::Finding;
  bool norm_may_be_late(bool skip_on_overflow) const;
  bool nothing_to_agree_on();
  void look_at_norm();
  void reduce_late();
  std::vector<int> filled_units();
  Finding measure_gradients(double loss_scale);
  int first_not_finite();
  [[noreturn]] void report_not_finite(int mine, std::string_view which);
  [[noreturn]] void report_unused();
  // Collective: brings what other ranks own to where this one holds it for them.
  void complete_slices(std::span<const int> units);
  std::vector<int> all_units(Changed changed) const;
  void update_weights(std::span<const GroupScalars> groups, const GradientScale& scale);
  std::vector<int> first_needed_by_all();  // collective
  void update_and_fetch(std::span<const GroupScalars> groups, const GradientScale& scale);

  EngineOptions options_;
  std::shared_ptr<comm::Collectives> collectives_;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<offload::StateStore> states_;
  InitReport init_report_;
  Weights weights_;
  StepRecorder recorder_;
  StepTrace trace_;
  Gatherer gatherer_;
  Reducer reducer_;
  GradientNorm norm_;
  Finding last_;              // of the last step whose norm is known
  bool failed_late_ = false;  // its gradients were not finite, which nobody was told yet
  OptimizerShards shards_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  bool forward_seen_ = false;  // since the last micro-step
  bool forward_used_ = false;  // a backward pass followed it
  bool pass_started_ = false;
  bool in_backward_ = false;
  bool backward_seen_ = false;  // since the last step
};

}  // namespace strata::engine
