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

// The last part of a step: the optimizer updates this rank's shards, and every rank gets the new
// shards of other ranks that it holds.
//
// On a device that runs ahead with one-sided gathers, the optimizer first updates the units that
// every rank's next forward needs first. Ranks gather those, in rounds, while it updates the rest.
//
// Errors (Engine says what they leave): if a rank's optimizer fails, that rank throws its error,
// and all others throw one of the same class that names the rank. The collectives stay good, and
// weights can be loaded. An error after that ends the collectives, with its reason.
class WeightUpdate {
 public:
  explicit WeightUpdate(Engine& engine) : engine_(engine) {}

  // Collective: the parts of these units' slices that other ranks own go to this rank's copies of
  // them (ShardPosition::parts).
  void complete_slices(std::span<const int> indices) {
    comm::Collectives& collectives = engine_.collectives();
    if (collectives.shard_position().parts == 1) return;
    std::vector<comm::SliceMap> slices;
    for (const int index : indices) slices.push_back(nth(engine_.weights().units(), index).slices);
    collectives.complete_slices(slices);
  }
  void complete_slices(Changed changed) {
    std::vector<int> indices;
    for (const Unit& unit : engine_.weights().units()) {
      if (changed == Changed::kAll || unit.trainable()) indices.push_back(unit.id);
    }
    complete_slices(indices);
  }

  // Collective. From its beginning to its end no rank gathers the changing units.
  void run(std::span<const GroupScalars> groups, const GradientScale& scale) {
    try {
      agree_on(update_shards(groups, scale));
      bring_new_shards();
    } catch (...) {
      // The gathers under way copy shards of a failed update. Their errors would hide the cause.
      FirstError().attempt([this] { engine_.gatherer().abandon_lazy_gather(); });
      throw;
    }
  }

 private:
  // The least bytes of one round, and the most rounds: each costs a sync point of the ranks.
  static constexpr Bytes kFetchedTogether = 64_MiB;
  static constexpr int kMostRounds = 64;

  bool fetches_ahead() const {
    const comm::ShardPosition place = engine_.collectives().shard_position();
    return engine_.device().runs_ahead() && place.held_count() > 1 && place.parts == 1 &&
           engine_.collectives().traits().one_sided;
  }

  // The units that every rank's next forward needs first, in their common order. If only some ranks
  // need a unit, the other ranks do not report that they have updated it. Collective.
  std::vector<int> first_needed_by_all() {
    std::vector<int> common = engine_.gatherer().first_needed();
    for (const std::string& text : engine_.collectives().all_gather_text(text_of_numbers(common))) {
      const std::vector<int> theirs = numbers_of_text(text);
      const auto end = std::ranges::mismatch(common, theirs).in1;
      common.erase(end, common.end());
    }
    return common;
  }

  // Units in the order of their updates, cut into rounds.
  std::vector<std::vector<int>> plan_rounds(std::span<const int> updated) const {
    Bytes all;
    for (const int index : updated)
      all += nth(engine_.weights().units(), index).layout.flat_bytes();
    const Bytes together = std::max(kFetchedTogether, Bytes(all.value / kMostRounds));
    std::vector<std::vector<int>> rounds;
    Bytes bytes = together;  // of the last round
    for (const int index : updated) {
      if (bytes >= together) {
        rounds.emplace_back();
        bytes = Bytes();
      }
      rounds.back().push_back(index);
      bytes += nth(engine_.weights().units(), index).layout.flat_bytes();
    }
    return rounds;
  }

  // Returns the exception of this rank's optimizer, since all ranks have to learn of it.
  std::exception_ptr update_shards(std::span<const GroupScalars> groups,
                                   const GradientScale& scale) {
    const std::vector<int> first = fetches_ahead() ? first_needed_by_all() : std::vector<int>();
    std::vector<int> order = engine_.optimizer()->order(first);
    order.resize(first.size());
    const std::vector<std::vector<int>> rounds = plan_rounds(order);
    std::size_t round = 0;
    std::size_t updated = 0;  // of this round
    try {
      ShardedOptimizer& optimizer = *engine_.optimizer();
      const auto begin = [&] {
        return engine_.recorder().begin(Activity::kOptimizer, -1, {}, &optimizer.stream());
      };
      StepRecorder::Recording recording = begin();
      optimizer.step(groups, scale, first, [&](int unit, auto ended) {
        engine_.recorder().end(recording, unit, &optimizer.stream());
        hand_over(nth(engine_.weights().units(), unit), std::move(ended));
        if (round < rounds.size() && ++updated == rounds[round].size()) {
          updated = 0;
          engine_.collectives().group_barrier();
          engine_.gatherer().fetch_first(rounds[round++]);
        }
        recording = begin();
      });
    } catch (const CommError&) {
      throw;  // the others know already
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      // The other ranks wait at a barrier in each remaining round, and learn of the error after the
      // last one.
      FirstError().attempt([&] {
        for (; round < rounds.size(); ++round) engine_.collectives().group_barrier();
      });
      return error;
    }
    return nullptr;
  }

  // Lets work that needs the unit wait for its update: if the rank is alone, work that is queued
  // later and needs it; otherwise the compute stream, in which peers learn that it is new.
  void hand_over(Unit& unit, std::vector<std::shared_ptr<device::Event>> ended) {
    if (ended.empty()) return;
    unit.updating = std::move(ended);
    if (engine_.gatherer().alone()) {
      if (unit.whole) engine_.gatherer().to_complete(unit.id);
      return;
    }
    engine_.recorder().await_copies([&] { unit.await_update(engine_.device().compute_stream()); });
    unit.updating.clear();
  }

  void agree_on(const std::exception_ptr& mine) {
    try {
      if (engine_.collectives().world_size() > 1)
        agree_on_outcome(engine_.collectives(), "updating the weights",
                         mine != nullptr ? failure_of(mine) : Failure());
    } catch (...) {
      if (mine == nullptr) throw;
    }
    if (mine != nullptr) std::rethrow_exception(mine);
  }

  void bring_new_shards() {
    try {
      complete_slices(Changed::kTrainable);
      engine_.collectives().group_barrier();  // every shard is new before any rank gathers
      engine_.gatherer().gather_whole(Changed::kTrainable, /*late=*/true);
    } catch (const CommError&) {
      throw;  // the others know already
    } catch (const std::exception& error) {
      engine_.collectives().abort(
          fmt::format("its update of the weights failed: {}", error.what()));
      throw;
    }
  }

  Engine& engine_;
};

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
      optimizer_(
          make_optimizer(optimizer, options_, shards_, *device_, *stores_.states, recorder_)),
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
  WeightUpdate(*this).complete_slices(Changed::kAll);
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
  WeightUpdate(*this).complete_slices(units);
}

void Engine::begin_forward() {
  require_usable();
  state_offload_.require_weights("a forward");
  trace_.begin_step(recorder_);
  recorder_.begin_phase(Activity::kForwardPass);
  stores_.advance();
  if (pass_.begin_forward()) gatherer_.start_pass();
}

void Engine::begin_backward(bool boundary, bool synchronise) {
  require_usable();
  state_offload_.require_for_backward("backward()");
  pass_.require_backward_may_begin();
  recorder_.begin_phase(Activity::kBackwardPass);
  await_updates();  // gradients of the last step have been read then
  const bool reduces = synchronise && !options_.reduce_at_boundary;
  const BackwardPass between = reduces ? BackwardPass::kReduces : BackwardPass::kKeeps;
  reducer_.begin_backward(boundary ? BackwardPass::kLast : between, gatherer_.order().first_uses());
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
    WeightUpdate(*this).run(groups, scale);
  } catch (const std::exception& error) {
    pass_.fail_update(error.what());
    static_cast<void>(reducer_.abandon_backward());  // its error would hide the cause
    throw;
  }
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
