#include "strata/engine/step_control.h"

#include <algorithm>
#include <limits>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// Numbers of elements become bytes with the width of the weights; huge ones mean "no bound".
Bytes bytes_or_unbounded(Numel numel, DType dtype) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 16;
  return bytes_of(std::min(numel, Numel(kLargest)), dtype);
}

}  // namespace

EngineOptions engine_options_from(const Config& config, DType weights) {
  const DType dtype = config.precision.param_dtype.value_or(weights);
  EngineOptions options;
  options.stage = config.zero.stage;
  options.reduce_at_boundary = config.strata.reduce_at == ReduceAt::kBoundary;
  if (config.strata.refresh_at != LazyGather::kAuto)
    options.gather_lazily = config.strata.refresh_at == LazyGather::kForward;
  else if (config.zero.overlap_comm == false)
    options.gather_lazily = false;
  options.sum_gradients = config.gradient_op == GradientOp::kSum;
  options.reduce_dtype = config.precision.communication_dtype;
  options.accumulation_dtype = config.precision.grad_accum_dtype;
  const OffloadConfig& offload = config.offload;
  options.states = {offload.optimizer, offload.optimizer_tiers(), offload.optimizer_folders,
                    offload.staging};
  options.weights = {offload.param, offload.param_tiers(), offload.param_folders,
                     bytes_of(offload.param_staging, dtype)};
  options.staging = offload.staging_in_all;
  for (offload::StatePlacement* const place : {&options.states, &options.weights}) {
    if (options.staging) place->budget = *options.staging;
    place->asked = place->budget;
    place->budget = std::max(kLeastStaging, place->budget);
    place->io = offload.io;
    place->verify = offload.verify;
  }
  if (options.states.tier != memory::Tier::kDevice) options.gradient_tier = memory::Tier::kHost;
  options.gradients_in_16 =
      config.managed_accumulation && config.batch.accumulation_steps.value_or(1) == 1;
  options.lanes.which = config.strata.update;
  options.update_in_backward = config.strata.update_at == UpdateAt::kBackward;
  options.rounds_masters = config.precision.rounds_masters;
  options.moment_dtype = config.precision.moment_dtype;
  options.keeps_positive = config.strata.keep_small_moments;
  options.max_live =
      config.strata.max_live.value_or(bytes_or_unbounded(config.zero.max_live_parameters, dtype));
  options.max_live_is_hard = config.strata.max_live.has_value();
  options.max_reuse = config.zero.max_reuse_distance;
  options.fetches_scopes = !(config.zero.stage == 3 && config.zero.allgather_sequential);
  options.prefetch = bytes_or_unbounded(config.zero.prefetch_bucket_size, dtype);
  const bool narrow = size_of(dtype) < size_of(options.reduce_dtype);
  options.max_reducing =
      bytes_or_unbounded(config.zero.reduce_bucket_size, narrow ? dtype : options.reduce_dtype);
  options.allow_unused = config.zero.ignore_unused_parameters;
  options.gradient_clipping = config.gradient_clipping;
  options.trace = config.strata.trace.value_or("");
  options.trace_steps = config.strata.trace_steps;
  options.check_finite = (!config.precision.param_dtype && !options.update_in_backward) ||
                         config.precision.skip_on_overflow;
  options.decay_unused = config.strata.decay_unused;
  options.max_skipped_steps = config.strata.max_skipped_steps;
  return options;
}

StepControl::StepControl(Engine& engine, const Config& config)
    : engine_(engine),
      scaler_(config.precision.loss_scale),
      half_precision_(config.precision.scales_loss()),
      accumulation_steps_(config.batch.accumulation_steps.value_or(1)),
      counts_(config.managed_accumulation) {}

void StepControl::set_boundary(std::optional<bool> boundary) {
  if (!counts_)
    throw UsageError(
        "set_gradient_accumulation_boundary() has no meaning with managed_gradient_accumulation: "
        "false, where every step() updates the weights; remove the call or the key");
  boundary_ = boundary;
}

void StepControl::set_accumulation_steps(std::int64_t steps) {
  if (steps < 1) throw UsageError("gradient accumulation needs at least 1 step; got {}", steps);
  if (steps != accumulation_steps_) counted_from_ = micro_steps_;
  accumulation_steps_ = steps;
}

void StepControl::set_state(const State& state) {
  micro_steps_ = counted_from_ = state.micro_steps;
  micro_batches_ = state.micro_batches;
  passes_ = 0;
  global_steps_ = state.global_steps;
  scaler_.set_state(state.loss_scale);
  engine_.forget_step();
  engine_.gradient_check().set_skipped_steps(state.skipped_steps);
}

void StepControl::read_gradients(int unit, const WholeGradients::Take& take) {
  engine_.state_offload().require_for_backward("reading a gradient");
  engine_.finish_step();
  engine_.gradient_check().read(unit, take);
}

std::optional<StepResult> StepControl::step(std::span<const GroupScalars> groups) {
  const bool boundary = ends_step();
  if (boundary) engine_.state_offload().require_all("step()");  // before anything has changed
  engine_.end_micro_step();
  ++micro_steps_;
  micro_batches_ += counts_ ? 1 : passes_;
  passes_ = 0;
  if (!boundary) return std::nullopt;
  const StepResult result = engine_.step(groups, scaler_.scale(), half_precision_);
  ++global_steps_;
  scaler_.update(!result.applied);
  return result;
}

}  // namespace strata::engine
