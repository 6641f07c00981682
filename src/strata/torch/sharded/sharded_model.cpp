#include "strata/torch/sharded/sharded_model.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <system_error>

#include "strata/engine/checkpoint/shard_states.h"
#include "strata/format/manifest.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/start/adoption.h"
#include "strata/torch/start/lending.h"
#include "strata/torch/start/model_start.h"

namespace strata::torch {
namespace {

std::vector<at::Tensor> variables_of(const ModelInput& input) {
  std::vector<at::Tensor> variables;
  for (const ModelParameter& parameter : input.parameters) variables.push_back(parameter.variable);
  return variables;
}

std::int64_t count_of(const std::pair<Numel, Numel>& range) {
  return (range.second - range.first).value;
}

// As the engine's stores and checkpoints name it.
std::string_view kind_of(std::string_view kind) {
  return kind == kMaster ? format::kValue : kind;
}

bool has(const engine::ShardStates& states, int unit, std::string_view kind) {
  return std::ranges::count(states.kinds_of(unit), kind) > 0;
}

void require_numel(const at::Tensor& values, std::int64_t wanted, const std::string& name) {
  if (values.scalar_type() == at::kFloat && values.is_contiguous() && values.numel() == wanted)
    return;
  throw UsageError(
      "a state of parameter '{}' has {} elements in fp32; give as many; found {} in {}", name,
      wanted, values.numel(), c10::toString(values.scalar_type()));
}

}  // namespace

ShardedModel::ShardedModel(const ModelInput& input, const engine::Config& config,
                           engine::UpdateRule rule, ModelRuntime runtime, std::string name)
    : config_(config),
      runtime_(std::move(runtime)),
      room_(agreed_room(input, config, runtime_)),
      model_(plan_model(input, config,
                        {rule, runtime_.collectives->traits(), runtime_.device->runs_ahead()},
                        room_)),
      rule_(rule),
      parameters_(variables_of(input), runtime_.place, runtime_.device) {
  StartedModel started = start_model(input, model_, config_, runtime_, parameters_,
                                     {rule, std::move(name), std::exchange(runtime_.progress, {})});
  engine_ = std::move(started.engine);
  on_growth_ = std::move(started.on_growth);
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

forecast::MemoryForecast ShardedModel::memory_forecast() {
  forecast::Training training;
  training.options = engine().options();
  training.rule = rule_;
  training.traits = runtime_.collectives->traits();
  training.micro_steps = static_cast<int>(control().accumulation_steps());
  training.runs_ahead = runtime_.device->runs_ahead();
  training.saves_beside = config().async_checkpoints;
  plan::ModelPlan plan = model_.plan;
  for (const engine::Unit& unit : engine_->weights().units())  // some were unfrozen since
    engine::nth(plan.units, unit.id).trainable = unit.trainable();
  return forecast::forecast_memory(engine_->weights().params(), plan, model_.tree, training);
}

void ShardedModel::begin_forward() {
  engine().state_offload().require_weights("a forward");
  passes_->begin_forward();
}

void ShardedModel::enter_root() {
  values().require_own_memory();
  engine_->state_offload().require_weights("a forward");  // even without gradients
  passes_->enter_root();
}

void ShardedModel::begin_backward(std::span<const engine::GroupScalars> groups) {
  values().gather_what_was_saved();
  passes_->begin_backward(groups);
}

std::optional<engine::StepResult> ShardedModel::step(std::span<const engine::GroupScalars> groups) {
  values().require_own_memory();
  values_->note_step();
  return passes_->step(groups);
}

bool ShardedModel::offload_states(const engine::StateSet& states, bool pinned) {
  engine().state_offload().require_no_pass();
  passes_->let_go();
  passes_->shown_gradients().take_back();  // until all is back
  const std::shared_ptr<void> claim = passes_->scopes().claim();
  try {
    return engine_->state_offload().offload_states(states, pinned);
  } catch (...) {
    if (!engine_->state_offload().away().any()) passes_->show_gradients();  // all is as it was
    throw;
  }
}

void ShardedModel::reload_states() {
  engine().state_offload().reload_states();
  passes_->show_gradients();
}

void ShardedModel::lend_values(int param, const Borrowing& borrowing) {
  values().require_own_memory();
  if (lend_pieces(*engine_, runtime_.place, param, borrowing)) return;
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
  if (engine().state_offload().away().weights)
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
  scopes().end_backward();
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
        engine::nth(full, param) = parameters_.variable(param).detach().clone();
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
  on_growth_.reset();
  engine_.reset();
  parameters_.unbind(full);
}

AutocastGuard::AutocastGuard(const ShardedModel& model) : type_(model.place().type()) {
  const std::optional<DType> dtype = model.config().precision.autocast;
  if (!dtype) return;
  was_enabled_ = at::autocast::is_autocast_enabled(type_);
  dtype_before_ = at::autocast::get_autocast_dtype(type_);
  kept_casts_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(type_, true);
  at::autocast::set_autocast_dtype(type_, to_scalar_type(*dtype));
  at::autocast::set_autocast_cache_enabled(false);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (!dtype_before_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type_, was_enabled_);
  at::autocast::set_autocast_dtype(type_, *dtype_before_);
  at::autocast::set_autocast_cache_enabled(kept_casts_);
}

StateValues::StateValues(ShardedModel& model, int param)
    : model_(model),
      engine_(model.engine()),
      param_(param),
      unit_(engine_.weights().unit_of(param)),
      mine_(range_in_shard(engine_.weights(), param, engine_.collectives().shard_position().index)),
      at_(count_of(mine_) == 0 ? Numel() : offset_in_shard(engine_, param, mine_.first)) {}

std::pair<std::int64_t, std::int64_t> StateValues::range() const {
  return {mine_.first.value, mine_.second.value};
}

void StateValues::finish_queued() {
  engine_.state_offload().require_all("reading or setting a state of a parameter");
  engine_.finish_step();
  engine_.device().compute_stream().synchronize();
}

std::optional<at::Tensor> StateValues::part(std::string_view kind) {
  finish_queued();
  if (!unit_.trainable()) return std::nullopt;
  if (kind == kGradient) {
    model_.passes().shown_gradients().apply();
    if (!engine_.shards().gradients().filled(unit_.id)) return std::nullopt;
    float* const values = engine_.shards().gradients().values(unit_.id).data() + at_.size();
    at::Tensor copy = tensor_over(values, count_of(mine_), at::kFloat, model_.place()).clone();
    current_stream(model_.place()).synchronize();
    return copy;
  }
  engine::ShardStates states(engine_);
  if (!has(states, unit_.id, kind_of(kind))) return std::nullopt;
  const auto place = at::TensorOptions(at::kFloat).device(model_.place());
  if (kind != kMaster && states.in_8_bits(unit_.id)) return decoded(states, kind).to(place);
  const auto dtype = to_scalar_type(states.dtype_of(unit_.id, kind_of(kind)));
  const at::Tensor copy = at::empty({count_of(mine_)}, dtype);
  states.enqueue_read(unit_.id, kind_of(kind), at_, Numel(count_of(mine_)), mutable_bytes(copy));
  states.settle();
  return copy.to(place);
}

std::optional<HostCodes> StateValues::codes(std::string_view state) {
  finish_queued();
  if (!unit_.trainable()) return std::nullopt;
  engine::ShardStates states(engine_);
  if (!states.in_8_bits(unit_.id) || !has(states, unit_.id, state)) return std::nullopt;
  return read_codes(states, state);
}

HostCodes StateValues::read_codes(engine::ShardStates& states, std::string_view state) {
  const std::int64_t numel = count_of(mine_);
  HostCodes kept(numel);
  const std::string_view scales = engine::ShardStates::scales_of(state);
  states.enqueue_read(unit_.id, state, at_, Numel(numel), mutable_bytes(kept.codes));
  states.enqueue_read(unit_.id, scales, format::numel_of(scales, at_), Numel(kept.scales.numel()),
                      mutable_bytes(kept.scales));
  states.settle();
  return kept;
}

at::Tensor StateValues::decoded(engine::ShardStates& states, std::string_view state) {
  const HostCodes kept = read_codes(states, state);
  at::Tensor values = at::empty({kept.codes.numel()}, at::kFloat);
  kernels::decode8(map_of(state), kept.state(), floats_of(values));
  return values;
}

void StateValues::encode(engine::ShardStates& states, std::string_view state,
                         const at::Tensor& values) {
  const HostCodes kept(count_of(mine_));
  kernels::encode_again(map_of(state), floats_of(values.cpu().contiguous()), kept.state(),
                        state == plan::kExpAvgSq && engine_.options().keeps_positive);
  const std::string_view scales = engine::ShardStates::scales_of(state);
  states.enqueue_store(param_, state, mine_.first, Numel(kept.codes.numel()),
                       mutable_bytes(kept.codes).data(), DType::kUInt8);
  states.enqueue_store(param_, scales, format::numel_of(scales, mine_.first),
                       Numel(kept.scales.numel()), mutable_bytes(kept.scales).data(),
                       DType::kFloat32);
  states.settle();
}

std::optional<at::Tensor> StateValues::whole(std::string_view kind) {
  const std::optional<at::Tensor> mine = part(kind);
  if (!mine) return std::nullopt;
  return join(*mine);
}

std::optional<at::Tensor> StateValues::joined(const std::optional<at::Tensor>& mine) {
  if (mine) require_numel(*mine, count_of(mine_), engine_.weights().param(param_).name);
  finish_queued();
  double missing = mine || count_of(mine_) == 0 ? 0.0 : 1.0;
  engine_.collectives().all_reduce({&missing, 1}, comm::ReduceOp::kMax);
  if (missing > 0.0) return std::nullopt;
  const auto options = at::TensorOptions(at::kFloat).device(model_.place());
  return join(mine ? *mine : at::empty({0}, options));
}

std::optional<at::Tensor> StateValues::of_owner(const std::optional<at::Tensor>& mine) {
  const std::int64_t numel = engine_.weights().slot_of(param_).numel.value;
  if (mine) require_numel(*mine, numel, engine_.weights().param(param_).name);
  finish_queued();
  comm::Collectives& collectives = engine_.collectives();
  double owner = mine ? collectives.rank() : collectives.world_size();
  collectives.all_reduce({&owner, 1}, comm::ReduceOp::kMin);
  if (owner == collectives.world_size()) return std::nullopt;
  at::Tensor all = at::empty({numel}, at::TensorOptions(at::kFloat).device(model_.place()));
  if (mine) all.copy_(*mine);
  current_stream(model_.place()).synchronize();
  collectives.broadcast(mutable_bytes(all), static_cast<int>(owner));
  engine_.device().compute_stream().synchronize();
  return all;
}

at::Tensor StateValues::join(const at::Tensor& mine) {
  const engine::Weights& weights = engine_.weights();
  at::Tensor all = at::empty({weights.slot_of(param_).numel.value},
                             at::TensorOptions(at::kFloat).device(model_.place()));
  all.narrow(0, mine_.first.value, count_of(mine_)).copy_(mine);
  current_stream(model_.place()).synchronize();
  // If every shard group holds all shards, those of the first group count.
  for (int index = 0; index < unit_.layout.world_size(); ++index) {
    const std::pair<Numel, Numel> range = range_in_shard(weights, param_, index);
    if (count_of(range) == 0) continue;
    engine_.collectives().broadcast(
        mutable_bytes(all.narrow(0, range.first.value, count_of(range))), index);
  }
  engine_.device().compute_stream().synchronize();
  return all;
}

void StateValues::set_masters(const at::Tensor& values) {
  engine_.require_intact_weights();
  engine_.gatherer().invalidate(engine::Changed::kAll);
  engine_.collectives().barrier();  // now no rank reads this rank's shard
  engine_.weights().store(param_, mine_.first, Numel(count_of(mine_)), mutable_bytes(values).data(),
                          DType::kFloat32);
  engine_.weights_changed();
}

bool StateValues::set_part(std::string_view kind, const at::Tensor& values) {
  require_numel(values, count_of(mine_), engine_.weights().param(param_).name);
  if (!unit_.trainable()) return false;
  finish_queued();
  if (kind == kMaster) {
    set_masters(values);
    return true;
  }
  if (kind == kGradient) {
    if (!engine_.shards().gradients().filled(unit_.id)) return false;
    model_.passes().shown_gradients().take_back();
    engine_.reducer().edits().store(unit_.id, engine_.weights().slot_index_of(param_),
                                    values.const_data_ptr<float>());
    current_stream(model_.place()).synchronize();
    model_.passes().shown_gradients().show();
    return true;
  }
  engine::ShardStates states(engine_);
  if (!has(states, unit_.id, kind_of(kind))) return false;
  if (states.in_8_bits(unit_.id)) {
    encode(states, kind, values);
    return true;
  }
  states.enqueue_store(param_, kind_of(kind), mine_.first, Numel(count_of(mine_)),
                       mutable_bytes(values).data(), DType::kFloat32);
  states.settle();
  return true;
}

bool StateValues::set_whole(std::string_view kind, const at::Tensor& values) {
  require_numel(values, engine_.weights().slot_of(param_).numel.value,
                engine_.weights().param(param_).name);
  return set_part(kind, values.narrow(0, mine_.first.value, count_of(mine_)).to(model_.place()));
}

}  // namespace strata::torch
