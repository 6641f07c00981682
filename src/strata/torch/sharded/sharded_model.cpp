#include "strata/torch/sharded/sharded_model.h"

#include <system_error>

#include "strata/base/error.h"
#include "strata/torch/start/adoption.h"
#include "strata/torch/start/init_choice.h"
#include "strata/torch/start/lending.h"
#include "strata/torch/start/model_start.h"

namespace strata::torch {
namespace {

std::vector<at::Tensor> variables_of(const ModelInput& input) {
  std::vector<at::Tensor> variables;
  for (const ModelParameter& parameter : input.parameters) variables.push_back(parameter.variable);
  return variables;
}

forecast::Trainers trainers_with(engine::UpdateRule rule, const ModelRuntime& runtime) {
  return {rule, runtime.collectives->traits(), runtime.device->runs_ahead()};
}

}  // namespace

ShardedModel::ShardedModel(const ModelInput& input, const engine::Config& config,
                           engine::UpdateRule rule, ModelRuntime runtime, std::string name)
    : config_(config),
      runtime_(std::move(runtime)),
      room_(agreed_room(input, config, runtime_)),
      model_(plan_model(input, config, trainers_with(rule, runtime_), room_)),
      rule_(rule),
      parameters_(variables_of(input), runtime_.place, runtime_.device) {
  StartedModel started = start_model(input, model_, config_, runtime_, parameters_,
                                     {rule, std::move(name), std::exchange(runtime_.progress, {})});
  engine_ = std::move(started.engine);
  passes_ = std::move(started.passes);
  originals_ = std::move(started.replaced);
  values_ =
      std::make_unique<ValueAccess>(*engine_, parameters_, passes_->scopes(), config_.precision);
  parameters_.on_wanted([this](int unit) { values_->complete(unit); });
  parameters_.on_graphs([this](int unit) { return passes_->scopes().pending(unit); });
}

ShardedModel::~ShardedModel() {
  if (!alive()) return;
  FirstError untold;  // dropped: training has thrown errors of the device or the ranks
  untold.attempt([this] { let_go({}); });
}

void ShardedModel::free_originals() {
  if (originals_.empty()) return;
  try {
    freeing_ = std::jthread(
        [values = std::exchange(originals_, {})]() mutable { free(std::move(values)); });
  } catch (const std::system_error&) {
    // No thread could be started; the failed start has freed the values.
  }
}

void ShardedModel::require_alive() const {
  if (!alive())
    throw UsageError("the engine was destroyed; call initialize() again to go on with this model");
}

engine::Engine& ShardedModel::engine() {
  require_alive();
  return *engine_;
}

TrainingPasses& ShardedModel::passes() {
  require_alive();
  return *passes_;
}

ValueAccess& ShardedModel::values() {
  require_alive();
  return *values_;
}

forecast::MemoryForecast ShardedModel::memory_forecast() {
  forecast::Training training;
  training.options = engine().options();
  training.rule = rule_;
  training.traits = runtime_.collectives->traits();
  training.micro_steps = static_cast<int>(control().accumulation_steps());
  training.runs_ahead = runtime_.device->runs_ahead();
  training.saves_beside = config().async_checkpoints;
  return forecast::forecast_memory(engine_->weights().params(),
                                   plan_now(model_, engine_->weights()), model_.tree, training);
}

void ShardedModel::begin_forward() {
  require_alive();
  engine_->state_offload().require_weights("a forward");
  passes_->begin_forward();
}

void ShardedModel::enter_root() {
  values().require_own_memory();
  engine_->state_offload().require_weights("a forward");  // even without gradients
  passes_->enter_root();
}

void ShardedModel::leave_root(std::span<const at::Tensor> outputs) {
  if (alive()) passes_->leave_root(outputs);
}

at::Tensor ShardedModel::scale(const at::Tensor& loss) {
  require_alive();
  return passes_->scale(loss);
}

at::Tensor ShardedModel::factored(const at::Tensor& loss, bool by_accumulation) {
  require_alive();
  return passes_->factored(loss, by_accumulation);
}

void ShardedModel::begin_backward() {
  require_alive();
  values_->gather_what_was_saved();
  passes_->begin_backward();
}

void ShardedModel::end_backward() {
  require_alive();
  passes_->end_backward();
}

void ShardedModel::abandon_backward() noexcept {
  if (alive()) passes_->abandon_backward();
}

std::optional<engine::StepResult> ShardedModel::step(std::span<const engine::GroupScalars> groups) {
  values().require_own_memory();
  values_->note_step();
  return passes_->step(groups);
}

bool ShardedModel::offload_states(const engine::StateSet& states, bool pinned) {
  require_alive();
  engine_->state_offload().require_no_pass();
  passes_->let_go();
  passes_->shown_gradients().take_back();  // until all is back
  const Scopes::Claim claim(passes_->scopes());
  try {
    return engine_->state_offload().offload_states(states, pinned);
  } catch (...) {
    if (!engine_->state_offload().away().any()) passes_->show_gradients();  // all is as it was
    throw;
  }
}

void ShardedModel::reload_states() {
  require_alive();
  engine_->state_offload().reload_states();
  passes_->show_gradients();
}

void ShardedModel::gather(std::span<const int> params) {
  require_alive();
  values_->gather(params);
}

void ShardedModel::release(std::span<const int> params, bool discard) {
  if (alive()) values_->release(params, discard);
}

bool ShardedModel::read(int param) {
  return alive() && values_->read(param);
}

bool ShardedModel::gathered(int param) const {
  return alive() && values_->gathered(param);
}

void ShardedModel::put_back(std::span<const int> params) {
  for (const int param : params) parameters_.put_back(param);
}

std::pair<Numel, Numel> ShardedModel::owned_range(int param) const {
  require_alive();
  return engine_->weights().owned_range(param);
}

void ShardedModel::lend_values(int param, const Borrowing& borrowing) {
  values().require_own_memory();
  if (lends_pieces(*engine_) && (borrowing.own_part || !borrowing.may_be_whole)) {
    lend_pieces(*engine_, runtime_.place, param, borrowing);
    return;
  }
  const int params[] = {param};
  gather(params);
  FirstError first;
  first.attempt([&] {
    const at::Tensor& full = parameters_.full_view(param);
    borrowing.use(Numel(), in_memory_order(full, channels_last(param)).view({-1}));
  });
  release(params, true);
  first.rethrow();
}

void ShardedModel::wait_for_all() {
  engine().gatherer().complete_all();
  engine().collectives().barrier();
}

void ShardedModel::destroy(bool keep_values) {
  require_alive();
  if (engine_->state_offload().away().weights)
    engine_->state_offload().reload_states();  // parameters keep values
  passes_->scopes().end_micro_step();
  engine_->gatherer().complete_all();
  std::vector<at::Tensor> full;
  try {
    full = own_copies(keep_values);
  } catch (const c10::OutOfMemoryError&) {
    if (keep_values) throw;  // otherwise the caller did not ask for copies
  }
  wait_for_all();
  let_go(full);
}

void ShardedModel::retire() {
  require_alive();
  passes_->scopes().end_backward();
  wait_for_all();
  let_go({});
}

std::vector<at::Tensor> ShardedModel::own_copies(bool of_sharded) {
  std::vector<at::Tensor> full(static_cast<std::size_t>(parameters_.size()));
  for (const engine::Unit& unit : engine_->weights().units()) {
    if (!of_sharded && !unit.whole) continue;
    gather(unit.spec.params);
    FirstError first;
    first.attempt([&] {
      for (const int param : unit.spec.params)
        full[static_cast<std::size_t>(param)] = parameters_.variable(param).detach().clone();
    });
    release(unit.spec.params, true);
    first.rethrow();
  }
  return full;
}

void ShardedModel::let_go(std::span<const at::Tensor> full) {
  parameters_.forget_pending();
  parameters_.on_graphs(nullptr);  // nothing is gathered any more
  values_.reset();
  passes_.reset();
  engine_.reset();
  parameters_.unbind(full);
}

}  // namespace strata::torch
