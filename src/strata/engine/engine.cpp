#include "strata/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/adam_optimizer.h"
#include "strata/engine/consistency.h"
#include "strata/engine/external_optimizer.h"
#include "strata/engine/scope_needs.h"

namespace strata::engine {
namespace {

bool wants_late_norm(const EngineOptions& options, const device::Device& device) {
  return options.late_norm.value_or(device.runs_ahead()) && options.check_finite;
}

ReducerOptions reducer_options(const EngineOptions& options, const plan::ModelPlan& plan,
                               const Weights& weights, const comm::Collectives& collectives,
                               const device::Device& device) {
  // The units of a scope become complete close to each other; what is less than they take would
  // have the model wait for reductions that have only begun.
  const Bytes scope = largest_scope(plan.scopes, weights.units(), ScopeUnits::kAll) * 3 / 2;
  return {options.name,
          options.reduce_dtype,
          options.accumulation_dtype,
          std::max(options.max_reducing, scope),
          options.sum_gradients,
          wants_late_norm(options, device) && collectives.gathers_on_device() &&
              options.accumulation_dtype == DType::kFloat32,
          scope};
}

// Units are fetched in runs of so much: each costs a meeting of the ranks.
constexpr Bytes kFetchedTogether = 64_MiB;

// Must precede every allocation that assumes equal models, so it runs while members are
// initialised.
std::shared_ptr<comm::Collectives> checked(std::shared_ptr<comm::Collectives> collectives,
                                           std::span<const plan::ParamSpec> params,
                                           const plan::ModelPlan& plan,
                                           const std::string& settings) {
  require_same_text(*collectives, "configuration", settings);
  require_same_text(*collectives, "model", plan::describe(params, plan));
  return collectives;
}

std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule kind, OptimizerShards& shards,
                                                 device::Device& device,
                                                 offload::StateStore& states) {
  switch (kind) {
    case UpdateRule::kNone:
      return nullptr;
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
      return std::make_unique<AdamOptimizer>(shards, device, states, kind == UpdateRule::kAdamW);
    case UpdateRule::kExternal:
      return std::make_unique<ExternalOptimizer>(shards, device);
  }
  return nullptr;
}

}  // namespace

Engine::Engine(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
               EngineOptions options, UpdateRule optimizer, const std::string& settings,
               std::shared_ptr<comm::Collectives> collectives,
               std::shared_ptr<device::Device> device, std::shared_ptr<offload::StateStore> states,
               ParameterViews& views)
    : options_(options),
      collectives_(checked(std::move(collectives), params, plan, settings)),
      device_(std::move(device)),
      states_(std::move(states)),
      init_report_(*device_),
      weights_(params, plan, options, *collectives_, *device_, *states_),
      recorder_(*device_, *collectives_, weights_.units()),
      trace_(options.trace, options.trace_steps),
      gatherer_(weights_.units(), *collectives_, *device_, views, recorder_,
                {options.max_live, options.prefetch, options.max_live_is_hard,
                 fetched_together(options, plan.scopes, weights_.units()),
                 options.refresh_late.value_or(device_->runs_ahead())}),
      reducer_(weights_.units(), *collectives_, *device_, recorder_,
               reducer_options(options, plan, weights_, *collectives_, *device_)),
      norm_(*collectives_, *device_, reducer_.shards()),
      shards_(weights_, reducer_.shards(), collectives_->shard_place().index),
      optimizer_(make_optimizer(optimizer, shards_, *device_, *states_)) {
  if (!plan.scopes.empty()) gatherer_.expect(expected_uses(plan.scopes));
}

Engine::~Engine() {
  trace_.end(recorder_, *collectives_);
}

void Engine::prepare() {
  weights_.back_all();
  if (optimizer_ != nullptr) optimizer_->prepare();
}

void Engine::weights_changed(bool complete) {
  weights_.back_all();
  gatherer_.invalidate(Changed::kAll);
  complete_slices(all_units(Changed::kAll));
  if (complete) {
    collectives_->barrier();
    return;
  }
  Bytes whole;
  for (const Unit& unit : weights_.units()) whole += Bytes(unit.resident.size());
  InitReport::Phase phase(init_report_, "all-gather", whole);
  collectives_->barrier();  // every rank's shards are written before anybody reads them
  gatherer_.refresh_whole(Changed::kAll, /*late=*/false);
  device_->compute_stream().synchronize();
  phase.moved(whole);
}

void Engine::adopt_flat(std::span<const int> params) {
  std::vector<int> units;
  for (const int param : params) {
    const Unit& unit = weights_.unit_of(param);
    if (std::ranges::find(units, unit.id) == units.end()) units.push_back(unit.id);
    const plan::Slot& slot = weights_.slot_of(param);
    const DType dtype = unit.layout.dtype();
    const auto [begin, end] = weights_.owned_range(param);
    if (begin == end) continue;
    const std::byte* source =
        gatherer_.flat(unit.id).data() + bytes_of(slot.offset + begin, dtype).size();
    weights_.store(param, begin, end - begin, source, dtype);
  }
  complete_slices(units);
}

void Engine::complete_slices(std::span<const int> units) {
  if (collectives_->shard_place().parts == 1) return;
  std::vector<comm::SliceMap> slices;
  for (const int unit : units)
    slices.push_back(weights_.units()[static_cast<std::size_t>(unit)].slices);
  collectives_->complete_slices(slices);
}

std::vector<int> Engine::all_units(Changed changed) const {
  std::vector<int> units;
  for (const Unit& unit : weights_.units()) {
    if (changed == Changed::kAll || unit.trainable()) units.push_back(unit.id);
  }
  return units;
}

void Engine::begin_forward() {
  trace_.begin_step(recorder_);
  recorder_.begin_phase(Activity::kForwardPass);
  if (!pass_started_) gatherer_.start_pass();
  pass_started_ = true;
  forward_seen_ = true;
  forward_used_ = false;
}

void Engine::begin_backward(bool boundary, bool synchronise) {
  if (in_backward_) throw UsageError("backward() was called while a backward pass is running");
  if (!forward_seen_) {
    throw UsageError(
        "backward() was called without a forward pass; call the engine with a batch first, then "
        "backward() on the loss it gave");
  }
  recorder_.begin_phase(Activity::kBackwardPass);
  reducer_.begin_backward(boundary || (synchronise && !options_.reduce_at_boundary),
                          gatherer_.order().first_uses(), boundary);
  in_backward_ = true;
}

void Engine::add_gradient(int param, const std::byte* gradient, DType dtype,
                          std::shared_ptr<const void> keep) {
  const Unit& unit = weights_.unit_of(param);
  if (!unit.trainable()) {
    throw UsageError(fmt::format(
        "parameter '{}' got a gradient, but it was frozen when the engine was made; set "
        "requires_grad before initialize()",
        weights_.param(param).name));
  }
  reducer_.add(unit.id, weights_.slot_index_of(param), gradient, dtype, std::move(keep));
}

void Engine::end_backward() {
  STRATA_ASSERT(in_backward_);
  reducer_.end_backward();
  recorder_.end_phase();
  in_backward_ = false;
  forward_used_ = true;
  pass_started_ = false;
  backward_seen_ = true;
}

void Engine::end_micro_step() {
  if (forward_used_) forward_seen_ = false;
}

void Engine::abandon_backward() {
  recorder_.end_phase();
  in_backward_ = false;
  forward_seen_ = false;
  pass_started_ = false;
  backward_seen_ = false;
  reducer_.abandon_backward();
}

void Engine::zero_gradients() {
  reducer_.clear_unused();
  reducer_.drop_gradients();
  backward_seen_ = false;
}

void Engine::reduce_late() {
  // Which units are late is known to each rank only for itself; all must reduce the union.
  std::string mine;
  for (const int unit : reducer_.late_units()) mine += fmt::format("{} ", unit);
  std::vector<bool> late(weights_.units().size());
  for (const std::string& text : collectives_->all_gather_text(mine)) {
    std::size_t at = 0;
    while (at < text.size()) {
      const std::size_t space = text.find(' ', at);
      late[static_cast<std::size_t>(std::stoi(text.substr(at, space - at)))] = true;
      at = space + 1;
    }
  }
  std::vector<int> units;
  for (std::size_t i = 0; i < late.size(); ++i) {
    if (late[i]) units.push_back(static_cast<int>(i));
  }
  reducer_.reduce_late(units);
}

std::vector<int> Engine::filled_units() {
  std::vector<int> result;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    if (reducer_.shards().filled(shard.unit)) result.push_back(shard.unit);
  }
  return result;
}

Engine::Finding Engine::measure_gradients(double loss_scale) {
  const auto measure = [this](bool with_late) {
    double sum = 0.0;
    double not_finite = 0.0;
    for (const kernels::GradStats& stats : reducer_.shards().statistics(filled_units())) {
      sum += stats.sum_of_squares;
      if (!stats.finite) not_finite += 1.0;
    }
    // The one all-reduce of a step. It also is the synchronisation before the shards change:
    // whoever takes part has finished its gathers.
    // Every group has all shards: those of the first one count.
    if (collectives_->shard_place().group > 0) sum = 0.0;
    std::vector<double> values{sum, not_finite,
                               with_late ? static_cast<double>(reducer_.late_units().size()) : 0.0,
                               reducer_.unused_param() >= 0 ? 1.0 : 0.0};
    collectives_->all_reduce(values, comm::ReduceOp::kSum);
    return values;
  };
  reducer_.complete_groups();
  std::vector<double> values = measure(true);
  if (values[3] > 0.0 && !options_.allow_unused) report_unused();
  if (values[2] > 0.0) {
    reduce_late();
    values = measure(false);
  }
  const bool finite = values[1] == 0.0;
  const double norm =
      finite ? kernels::norm_of(values[0], loss_scale) : std::numeric_limits<double>::infinity();
  return {norm, finite};
}

void Engine::report_unused() {
  const int param = reducer_.unused_param();
  const std::vector<std::string> texts =
      collectives_->all_gather_text(param >= 0 ? weights_.param(param).name : "");
  std::string where;
  for (std::size_t r = 0; r < texts.size() && where.empty(); ++r) {
    if (!texts[r].empty()) where = fmt::format("'{}' on rank {}", texts[r], r);
  }
  zero_gradients();
  throw UsageError(
      fmt::format("a trainable parameter got no gradient in this step, which "
                  "zero_optimization.ignore_unused_parameters=false makes an error; use it in the "
                  "loss, freeze it, or allow it. The step's gradients are dropped. First: {}",
                  where));
}

int Engine::first_not_finite() {
  const std::vector<int> filled = filled_units();
  const std::vector<kernels::GradStats> stats = reducer_.shards().statistics(filled);
  for (std::size_t i = 0; i < stats.size(); ++i) {
    if (!stats[i].finite) return filled[i];
  }
  return -1;
}

// `mine`: a unit in which this rank found one; -1: none.
void Engine::report_not_finite(int mine, std::string_view which) {
  std::string where;
  const std::vector<std::string> texts = collectives_->all_gather_text(
      mine < 0 ? "" : weights_.units()[static_cast<std::size_t>(mine)].name());
  for (std::size_t r = 0; r < texts.size() && where.empty(); ++r) {
    if (!texts[r].empty()) where = fmt::format("unit '{}' in the shard of rank {}", texts[r], r);
  }
  zero_gradients();
  throw NumericsError(
      fmt::format("the gradients of {} are not finite (NaN or infinity; usually the loss "
                  "was). The weights are "
                  "unchanged and the step's gradients are dropped, so training may go on with "
                  "other data or a lower "
                  "learning rate. First found in: {}",
                  which, where));
}

void Engine::update_weights(std::span<const GroupScalars> groups, const GradientScale& scale) {
  const comm::ShardPlace place = collectives_->shard_place();
  if (device_->runs_ahead() && place.held_count() > 1 && place.parts == 1) {
    update_and_fetch(groups, scale);
    return;
  }
  run_recorded(*optimizer_, recorder_, groups, scale, {}, [](int /*unit*/) {});
  complete_slices(all_units(Changed::kTrainable));
  collectives_->group_barrier();  // every shard is new before anybody gathers
  gatherer_.refresh_whole(Changed::kTrainable, /*late=*/true);
}

// What the next forward needs first is updated first, and fetched while the rest is updated.
void Engine::update_and_fetch(std::span<const GroupScalars> groups, const GradientScale& scale) {
  const bool one_sided = collectives_->one_sided();
  const std::vector<int> first = one_sided ? gatherer_.first_needed() : std::vector<int>();
  std::size_t missing = first.size();
  std::vector<int> ready;
  Bytes ready_bytes;
  const auto fetch = [&] {
    collectives_->group_barrier();
    gatherer_.fetch_first(std::exchange(ready, {}));
    ready_bytes = Bytes();
  };
  const auto updated = [&](int unit) {
    if (missing == 0) return;  // those that are needed first come before all others
    --missing;
    ready.push_back(unit);
    ready_bytes += weights_.units()[static_cast<std::size_t>(unit)].layout.flat_bytes();
    if (ready_bytes >= kFetchedTogether || missing == 0) fetch();
  };
  run_recorded(*optimizer_, recorder_, groups, scale, first, updated);
  collectives_->group_barrier();
  gatherer_.refresh_whole(Changed::kTrainable, /*late=*/true);
}

StepResult Engine::step(std::span<const GroupScalars> groups, double loss_scale,
                        bool skip_on_overflow) {
  if (optimizer_ == nullptr) {
    throw UsageError(
        "step() was called on an engine without an optimizer; give initialize() an optimizer, or "
        "an "
        "'optimizer' section in the configuration");
  }
  if (!backward_seen_) {
    throw UsageError(
        "step() was called without a backward pass since the last step; call backward() first");
  }
  settle_step();
  // First, since gathers of what will change must be over when the others hear from this rank.
  gatherer_.invalidate(Changed::kTrainable);
  recorder_.begin_phase(Activity::kUpdate);
  StepResult result;
  const auto norm = recorder_.begin(Activity::kNorm, -1);
  if (norm_may_be_late(skip_on_overflow) && nothing_to_agree_on()) {
    norm_.begin(loss_scale, options_.gradient_clipping);
    recorder_.end(norm);
    result = {true, std::nullopt};
    update_weights(groups, {1.0F, norm_.factor()});
  } else {
    last_ = measure_gradients(loss_scale);
    recorder_.end(norm);
    recorder_.note_idle();
    if (!last_.finite && !skip_on_overflow && options_.check_finite)
      report_not_finite(first_not_finite(), "this step");
    result = {last_.finite || !skip_on_overflow, last_.norm};
    if (result.applied) update_weights(groups, {scale_of(last_.norm, loss_scale), nullptr});
  }
  zero_gradients();
  trace_.end_step(recorder_, *collectives_);
  return result;
}

float Engine::scale_of(double norm, double loss_scale) const {
  double scale = 1.0 / loss_scale;
  if (options_.gradient_clipping > 0.0)
    scale *= std::min(1.0, options_.gradient_clipping / (norm + 1e-6));
  return static_cast<float>(scale);
}

// What is not finite must be noticed by the update itself: where it is to be skipped the loss scale
// depends on that, and where it is to be applied there is nothing to notice.
bool Engine::norm_may_be_late(bool skip_on_overflow) const {
  return wants_late_norm(options_, *device_) && !skip_on_overflow &&
         optimizer_->takes_late_scale() && norm_.available();
}

// No rank has late gradients to reduce, or unused parameters to complain of.
bool Engine::nothing_to_agree_on() {
  const bool something =
      !reducer_.late_units().empty() || (reducer_.unused_param() >= 0 && !options_.allow_unused);
  const std::vector<std::string> texts = collectives_->all_gather_text(something ? "!" : "");
  return std::ranges::all_of(texts, [](const std::string& text) { return text.empty(); });
}

void Engine::look_at_norm() {
  if (!norm_.begun()) return;
  last_ = norm_.finish();
  if (last_.finite) return;
  last_.norm = std::numeric_limits<double>::infinity();
  failed_late_ = true;
}

double Engine::grad_norm() {
  look_at_norm();
  return last_.norm;
}

void Engine::settle_step() {
  look_at_norm();
  if (!std::exchange(failed_late_, false)) return;
  optimizer_->forget_step();
  report_not_finite(norm_.first_not_finite(), "the last step");
}

}  // namespace strata::engine
