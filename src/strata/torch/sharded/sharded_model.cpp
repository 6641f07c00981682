#include "strata/torch/sharded/sharded_model.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/consistency.h"
#include "strata/offload/memory_store.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/start/adoption.h"
#include "strata/torch/start/init_choice.h"
#include "strata/torch/start/original_values.h"

namespace strata::torch {
namespace {

std::vector<at::Tensor> variables_of(const ModelInput& input) {
  std::vector<at::Tensor> variables;
  for (const ModelParameter& parameter : input.parameters) variables.push_back(parameter.variable);
  return variables;
}

// Threads that take the values of a live model in.
int intake_threads(const ModelInput& input, const engine::Config& config,
                   const ModelRuntime& runtime) {
  bool any = false;
  bool on_host = false;
  for (const ModelParameter& parameter : input.parameters) {
    any = any || parameter.has_own_values();
    on_host = on_host || (parameter.has_own_values() && parameter.variable.is_cpu());
  }
  const comm::Collectives& collectives = *runtime.collectives;
  if (on_host && collectives.world_size() > 1 && collectives.rank() == 0)
    return reference_threads(config.strata.threads, collectives.world_size());
  return any ? runtime.threads : 1;
}

bool comes_from_files(const ModelInput& input) {
  return std::ranges::none_of(input.parameters, &ModelParameter::has_values);
}

}  // namespace

ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives) {
  std::shared_ptr<device::Device> device = make_device(place, threads);
  std::shared_ptr<offload::StateStore> states = offload::MemoryStore::on_device(*device);
  return {place, std::move(collectives), std::move(device), std::move(states), {}, threads};
}

ShardedModel::ShardedModel(const ModelInput& input, const engine::Config& config,
                           engine::UpdateRule rule, ModelRuntime runtime, std::string name)
    : config_(config),
      runtime_(std::move(runtime)),
      specs_(param_specs(input, config)),
      plan_(plan_model(specs_, input.tree, config)),
      tree_(input.tree),
      rule_(rule),
      parameters_(variables_of(input), runtime_.place) {
  for (std::size_t i = 0; i < input.parameters.size(); ++i) {
    index_.emplace(input.parameters[i].variable.unsafeGetTensorImpl(), static_cast<int>(i));
  }
  check_ranks(input);
  OriginalValues originals(input.parameters);
  ThreadPool threads(intake_threads(input, config, runtime_));
  try {
    start(input, rule, std::move(name), threads, originals);
  } catch (const OutOfMemoryError& error) {
    give_back(originals);
    if (originals.given_up() == 0) throw;
    throw OutOfMemoryError(
        fmt::format("{}. The memory of {} of {} parameters had been given up for the engine's by "
                    "then: build the model again",
                    error.what(), originals.given_up(), originals.size()));
  } catch (...) {
    give_back(originals);
    throw;
  }
  originals_ = originals.release();
  release_cached_memory(runtime_.place);  // maps nothing while much is unmapped
}

void ShardedModel::free_originals() {
  if (!originals_.empty()) {
    freeing_.emplace_back(
        [values = std::exchange(originals_, {})]() mutable { free(std::move(values)); });
  }
  if (!files_.empty()) {
    freeing_.emplace_back(
        [files = std::exchange(files_, {})]() mutable { unmap(std::move(files)); });
  }
}

// Before anything is asked that ranks answer together.
void ShardedModel::check_ranks(const ModelInput& input) const {
  comm::Collectives& collectives = *runtime_.collectives;
  if (collectives.world_size() == 1) return;
  engine::require_same_text(collectives, "configuration", config_.digest());
  engine::require_same_text(collectives, "model",
                            plan::describe(specs_, plan_) + describe_values(input.parameters));
}

void ShardedModel::start(const ModelInput& input, engine::UpdateRule rule, std::string name,
                         ThreadPool& threads, OriginalValues& originals) {
  engine::EngineOptions options = engine::engine_options_from(config_);
  options.name = std::move(name);
  const plan::InitChoice choice =
      choose_init(input, specs_, plan_, config_, rule, runtime_);  // before anything is moved
  engine_ = std::make_unique<engine::Engine>(specs_, plan_, options, rule, config_.digest(),
                                             runtime_.collectives, runtime_.device, runtime_.states,
                                             parameters_);
  engine_->init_report().set_progress(std::move(runtime_.progress));
  engine_->init_report().set_tier(std::string(name_of(choice.tier)), choice.reason);
  if (comes_from_files(input)) engine_->prepare();  // nothing has to go first
  const bool complete =
      adopt_values(*engine_, runtime_.place, input.parameters, choice.tier, threads, originals);
  parameters_.bind(engine_->weights());
  parameters_.on_wanted([this](int unit) { complete_for_reader(unit); });
  hooks_ = std::make_unique<GradientHooks>(*engine_, parameters_);
  parameters_.settle();
  std::vector<Scopes::Scope> scopes;
  for (const plan::ScopeSpec& scope : plan_.scopes) {
    const plan::ModuleNode& module = input.tree[static_cast<std::size_t>(scope.module)];
    scopes.push_back({module.path.empty() ? module.class_name : module.path, scope.units,
                      module.read_in_backward || !module.callable});
  }
  scopes_ = std::make_unique<Scopes>(*engine_, std::move(scopes));
  control_ = std::make_unique<engine::StepControl>(*engine_, config_);
  engine_->weights_changed(complete);
  engine_->prepare();
}

// After a start that failed.
void ShardedModel::give_back(OriginalValues& originals) noexcept {
  if (parameters_.bound()) {
    let_go({});
  } else {
    engine_.reset();
  }
  release_cached_memory(runtime_.place);
  originals.restore();
}

ShardedModel::~ShardedModel() {
  if (alive()) let_go({});
}

void ShardedModel::require_alive() const {
  if (!alive())
    throw UsageError("the engine was destroyed; call initialize() again to go on with this model");
}

engine::Engine& ShardedModel::engine() {
  require_alive();
  return *engine_;
}

Scopes& ShardedModel::scopes() {
  require_alive();
  return *scopes_;
}

engine::StepControl& ShardedModel::control() {
  require_alive();
  return *control_;
}

forecast::MemoryForecast ShardedModel::memory_forecast() {
  forecast::Training training;
  training.options = engine().options();
  training.rule = rule_;
  training.micro_steps = static_cast<int>(control().accumulation_steps());
  training.runs_ahead = runtime_.device->runs_ahead();
  return forecast::forecast_memory(specs_, plan_, tree_, training,
                                   forecast::carriers_of(*runtime_.collectives));
}

void ShardedModel::begin_forward() {
  require_alive();
  scopes_->release_idle_reads();
  engine_->begin_forward();
}

void ShardedModel::begin_backward() {
  require_alive();
  control_->begin_backward();
}

void ShardedModel::end_backward() {
  scopes_->end_backward();
  control_->end_backward();
}

void ShardedModel::abandon_backward() noexcept {
  if (!alive()) return;
  scopes_->end_backward();
  control_->abandon_backward();
}

std::optional<engine::StepResult> ShardedModel::step(std::span<const engine::GroupScalars> groups) {
  require_alive();
  scopes_->end_backward();
  step_stream_ = current_stream(runtime_.place);
  return control_->step(groups);
}

void ShardedModel::gather(std::span<const int> params) {
  require_alive();
  std::set<int> units;
  for (const int param : params) units.insert(engine_->weights().unit_of(param).id);
  for (const int unit : units) {
    engine_->gatherer().acquire(unit);
    ++held_[unit];
  }
}

void ShardedModel::release(std::span<const int> params, bool discard) {
  if (!alive()) return;
  std::set<int> units;
  for (const int param : params) units.insert(engine_->weights().unit_of(param).id);
  for (const int unit : units) {
    // What an outer holder writes is its own to keep.
    const bool last = --held_[unit] == 0;
    if (discard && last) {
      engine_->gatherer().discard(unit);
    } else {
      engine_->gatherer().release(unit);
    }
  }
}

void ShardedModel::publish(std::span<const int> params, int root) {
  require_alive();
  const int world = runtime_.collectives->world_size();
  if (root < 0 || root >= world) {
    throw UsageError(
        fmt::format("modifier_rank must be a rank of this job, 0 to {}; got {}", world - 1, root));
  }
  for (const int param : params) {
    const engine::Unit& unit = engine_->weights().unit_of(param);
    const plan::Slot& slot = engine_->weights().slot_of(param);
    const auto flat = engine_->gatherer().flat(unit.id);
    const DType dtype = unit.layout.dtype();
    runtime_.collectives->broadcast(
        flat.subspan(bytes_of(slot.offset, dtype).size(), bytes_of(slot.numel, dtype).size()),
        root);
  }
  engine_->adopt_flat(params);
  // Peers may gather from now on. A rank that waits here has read everything that it still wanted.
  runtime_.collectives->barrier();
}

bool ShardedModel::read(int param) {
  if (!alive() || gathered(param)) return false;
  scopes_->read(engine_->weights().unit_of(param).id);
  return true;
}

// A reader on the stream of the step has that stream wait; what the model does there comes after.
// Any other stream knows nothing of it later, and nothing of the reader's: the values are there
// when this returns.
void ShardedModel::complete_for_reader(int unit) {
  engine_->gatherer().complete(unit);
  if (step_stream_ && current_stream(runtime_.place) != *step_stream_)
    engine_->device().compute_stream().synchronize();
}

int ShardedModel::index_of(const at::Tensor& variable) const {
  const auto found = index_.find(variable.unsafeGetTensorImpl());
  return found == index_.end() ? -1 : found->second;
}

bool ShardedModel::gathered(int param) const {
  return alive() && engine_->gatherer().gathered(engine_->weights().unit_of(param).id);
}

void ShardedModel::destroy(bool keep_values) {
  require_alive();
  scopes_->end_backward();
  std::vector<at::Tensor> full;
  if (keep_values) {
    for (int i = 0; i < parameters_.size(); ++i) {
      const int params[] = {i};
      gather(params);
      full.push_back(parameters_.variable(i).detach().clone());
      release(params, false);
    }
  }
  wait_for_all();
  let_go(std::move(full));
}

void ShardedModel::let_go(std::vector<at::Tensor> full) {
  full.resize(static_cast<std::size_t>(parameters_.size()));
  hooks_.reset();
  scopes_.reset();
  control_.reset();
  engine_.reset();
  parameters_.unbind(full);
}

}  // namespace strata::torch
