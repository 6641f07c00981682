#include "strata/engine/engine.h"

#include <algorithm>
#include <utility>

#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// Must precede every allocation that assumes equal models, so it runs while members are
// initialised.
std::shared_ptr<comm::Collectives> checked(std::shared_ptr<comm::Collectives> collectives,
                                           std::span<const plan::ParamSpec> params,
                                           const plan::ModelPlan& plan,
                                           const std::string& settings) {
  agree_on_text(*collectives, "configuration", settings);
  agree_on_text(*collectives, "model", plan::describe(params, plan));
  return collectives;
}

}  // namespace

Engine::Engine(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
               EngineOptions options, UpdateRule optimizer, const std::string& settings,
               std::shared_ptr<comm::Collectives> collectives,
               std::shared_ptr<device::Device> device, Stores stores, ParameterViews& views)
    : options_(std::move(options)),
      collectives_(checked(std::move(collectives), params, plan, settings)),
      device_(std::move(device)),
      stores_(std::move(stores)),
      init_report_(*device_),
      weights_(params, plan, options_, masters_for(optimizer, options_), *collectives_, *device_,
               stores_),
      recorder_(*device_, *collectives_, weights_.units()),
      links_(*device_, {stores_.states, stores_.weights}, options_.offloads(), recorder_),
      trace_(options_.trace, options_.trace_steps),
      gatherer_(weights_.units(), weights_.shards(), *collectives_, *device_, views, recorder_,
                options_, plan.scopes),
      reducer_(weights_.units(), *collectives_, *device_, recorder_, options_, plan.scopes),
      check_(reducer_, weights_, *collectives_, *device_, recorder_, options_),
      shards_(weights_, reducer_.shards(), collectives_->shard_position().index),
      optimizer_(make_optimizer(optimizer, options_, shards_, *collectives_, *device_,
                                *stores_.states, recorder_)),
      state_offload_(*this, stores_, pass_) {}

Engine::~Engine() {
  trace_.end(recorder_, *collectives_);
  // Queued work uses the memory that goes now. A failed device runs nothing.
  FirstError().attempt([this] { device_->compute_stream().synchronize(); });
}

void Engine::prepare() {
  // The optimizer's memory comes first: peers map the weights once they exist, and
  // meanwhile the driver serves no other request for memory.
  if (optimizer_ != nullptr) optimizer_->prepare();
  weights_.back_all();
}

void Engine::weights_changed(bool complete) {
  state_offload_.require_all("loading weights");
  weights_.back_all();
  gatherer_.invalidate(Changed::kAll);
  update_.complete_slices(Changed::kAll);
  if (complete) {
    collectives_->barrier();
    pass_.weights_loaded();
    return;
  }
  Bytes whole;
  for (const Unit& unit : weights_.units()) {
    if (!gatherer_.whole().started(unit.id)) whole += Bytes(unit.resident.size());
  }
  InitReport::Phase phase(init_report_, "all-gather", whole);
  collectives_->barrier();  // every rank's shards are written before any rank reads them
  gatherer_.gather_whole(Changed::kAll, /*late=*/false);
  device_->compute_stream().synchronize();
  phase.moved(whole);
  pass_.weights_loaded();
}

void Engine::adopt_flat(std::span<const int> params) {
  state_offload_.require_all("setting weights");
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
  update_.complete_slices(units);
}

void Engine::begin_forward() {
  require_usable();
  state_offload_.require_weights("a forward");
  trace_.begin_step(recorder_);
  recorder_.begin_phase(Activity::kForwardPass);
  stores_.advance();
  if (pass_.begin_forward()) gatherer_.start_pass();
}

void Engine::begin_backward(bool boundary, bool synchronise, std::span<const GroupScalars> groups) {
  require_usable();
  state_offload_.require_for_backward("backward()");
  pass_.require_backward_may_begin();
  reducer_.require_none_early();
  recorder_.begin_phase(Activity::kBackwardPass);
  await_updates();  // gradients of the last step have been read then
  const bool reduces = synchronise && !options_.reduce_at_boundary;
  const BackwardPass between = reduces ? BackwardPass::kReduces : BackwardPass::kKeeps;
  reducer_.begin_backward(boundary ? BackwardPass::kLast : between, gatherer_.order().first_uses(),
                          boundary ? update_.in_backward(groups) : nullptr);
  pass_.begin_backward();
}

void Engine::add_gradient(int param, const std::byte* gradient, DType dtype,
                          std::shared_ptr<const void> owner) {
  const Unit& unit = weights_.trainable_unit_of(param);
  reducer_.add(unit.id, weights_.slot_index_of(param), gradient, dtype, std::move(owner));
}

void Engine::end_backward() {
  STRATA_ASSERT(in_backward());
  reducer_.end_backward();
  stores_.advance();
  recorder_.end_phase();
  pass_.end_backward();
}

void Engine::zero_gradients() {
  if (in_backward()) throw UsageError("zero_grad() was called in backward(); call it afterwards");
  reducer_.edits().drop_all();
}

StepResult Engine::step(std::span<const GroupScalars> groups, double loss_scale,
                        bool skip_on_overflow) {
  if (optimizer_ == nullptr)
    throw UsageError(
        "step() was called on an engine without an optimizer; give initialize() an optimizer, or "
        "an 'optimizer' section in the configuration");
  require_usable();
  state_offload_.require_all("step()");
  pass_.require_gradients();
  finish_step();
  // First, since gathers of what will change must be over when the others hear from this rank.
  gatherer_.invalidate(Changed::kTrainable);
  recorder_.begin_phase(Activity::kUpdate);
  pass_.drop_gradients();  // used up, or dropped by an error
  const GradientCheck::Outcome found =
      check_.check(loss_scale, skip_on_overflow, optimizer_->takes_late_scale());
  if (found.applies)
    update_weights(groups, {found.factor, found.late_factor, found.factor_on_host});
  reducer_.drop_gradients();
  pass_.end_step();
  trace_.end_step(recorder_, *collectives_);
  return {found.applies, found.norm, check_.take_warning()};
}

std::optional<StepReport> Engine::step_report(bool wait) {
  auto report =
      make_step_report(recorder_, wait, collectives_->shard_position().held_count(), &links_);
  if (report && report->links && optimizer_ != nullptr) {
    report->links->lanes = optimizer_->lane_times();
    report->links->cached = optimizer_->cached();
  }
  return report;
}

void Engine::update_weights(std::span<const GroupScalars> groups, const GradientScale& scale) {
  try {
    update_.run(groups, scale);
  } catch (const std::exception& error) {
    pass_.fail_update(error.what());
    static_cast<void>(reducer_.abandon_backward());  // its error would hide the cause
    throw;
  }
}

void Engine::abandon_backward() noexcept {
  pass_.abandon_backward();
  if (update_.forget_early())
    pass_.fail_update("a backward pass failed after it had updated weights (strata.update_at)");
  abandoned_.attempt([this] { recorder_.end_phase(); });
  abandoned_.keep(reducer_.abandon_backward());
}

void Engine::await_updates() {
  for (Unit& unit : weights_.units()) {
    unit.await_update(device_->compute_stream());
    unit.updating.clear();
  }
}

// An error after the step has returned, which the other ranks do not know.
void Engine::require_updated(bool waits) {
  if (optimizer_ == nullptr) return;
  try {
    optimizer_->throw_failure(waits);
  } catch (const std::exception& error) {
    pass_.fail_update(error.what());
    static_cast<void>(reducer_.abandon_backward());  // its error would hide the cause
    if (collectives_->world_size() > 1)
      collectives_->abort(fmt::format("its update of the weights failed: {}", error.what()));
    throw;
  }
}

void Engine::finish_step() {
  require_updated(/*waits=*/true);
  await_updates();
  if (!check_.failed_late()) return;
  optimizer_->forget_step();
  try {
    check_.notify_late();
  } catch (const NumericsError&) {
    pass_.drop_gradients();
    throw;
  }
}

}  // namespace strata::engine
