#include "strata/engine/weight_update.h"

#include <algorithm>
#include <string>
#include <utility>

#include "strata/engine/engine.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// The least bytes of one round, and the most rounds: each costs a sync point of the ranks.
constexpr Bytes kFetchedTogether = 64_MiB;
constexpr int kMostRounds = 64;

}  // namespace
void WeightUpdate::complete_slices(std::span<const int> indices) {
  comm::Collectives& collectives = engine_.collectives();
  if (collectives.shard_position().parts == 1) return;
  std::vector<comm::SliceMap> slices;
  for (const int index : indices) slices.push_back(nth(engine_.weights().units(), index).slices);
  collectives.complete_slices(slices);
}

void WeightUpdate::complete_slices(Changed changed) {
  std::vector<int> indices;
  for (const Unit& unit : engine_.weights().units()) {
    if (changed == Changed::kAll || unit.trainable()) indices.push_back(unit.id);
  }
  complete_slices(indices);
}

std::function<void(int unit)> WeightUpdate::in_backward(std::span<const GroupScalars> groups) {
  if (!engine_.options().update_in_backward || groups.empty()) return nullptr;
  return [this, of_step = std::vector(groups.begin(), groups.end())](int unit) {
    early_ = of_step;
    engine_.optimizer()->update_early(unit, of_step);
  };
}

bool WeightUpdate::forget_early() {
  if (engine_.optimizer() != nullptr) engine_.optimizer()->forget_early();
  return !std::exchange(early_, {}).empty();
}

void WeightUpdate::run(std::span<const GroupScalars> groups, const GradientScale& scale) {
  try {
    agree_on(update_shards(groups, scale));
    bring_new_shards();
  } catch (...) {
    // The gathers under way copy shards of a failed update. Their errors would hide the cause.
    FirstError().attempt([this] { engine_.gatherer().abandon_lazy_gather(); });
    throw;
  }
}

bool WeightUpdate::fetches_ahead() const {
  const comm::ShardPosition place = engine_.collectives().shard_position();
  return engine_.device().runs_ahead() && place.held_count() > 1 && place.parts == 1 &&
         engine_.collectives().traits().one_sided;
}

// The units that every rank's next forward needs first, in their common order. If only some ranks
// need a unit, the other ranks do not report that they have updated it. Collective.
std::vector<int> WeightUpdate::first_needed_by_all() {
  std::vector<int> common = engine_.gatherer().first_needed();
  for (const std::string& text : engine_.collectives().all_gather_text(text_of_numbers(common))) {
    const std::vector<int> theirs = numbers_of_text(text);
    const auto end = std::ranges::mismatch(common, theirs).in1;
    common.erase(end, common.end());
  }
  return common;
}

// Units in the order of their updates, cut into rounds.
std::vector<std::vector<int>> WeightUpdate::plan_rounds(std::span<const int> updated) const {
  Bytes all;
  for (const int index : updated) all += nth(engine_.weights().units(), index).layout.flat_bytes();
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
std::exception_ptr WeightUpdate::update_shards(std::span<const GroupScalars> groups,
                                               const GradientScale& scale) {
  const std::vector<int> first = fetches_ahead() ? first_needed_by_all() : std::vector<int>();
  std::vector<int> order = engine_.optimizer()->order(first);
  order.resize(first.size());
  const std::vector<std::vector<int>> rounds = plan_rounds(order);
  std::size_t round = 0;
  std::size_t updated = 0;  // of this round
  try {
    const std::vector<GroupScalars> early = std::exchange(early_, {});
    if (!early.empty() && !std::ranges::equal(early, groups))
      throw UsageError(
          "the learning rate, or another number of a param group, has changed between backward() "
          "and step(), but strata.update_at: \"backward\" has updated weights in backward() by its "
          "value of then; change it before backward(), or write \"step\"");
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
void WeightUpdate::hand_over(Unit& unit, std::vector<std::shared_ptr<device::Event>> ended) {
  if (ended.empty()) return;
  unit.updating = std::move(ended);
  if (engine_.gatherer().alone()) {
    if (unit.whole) engine_.gatherer().to_complete(unit.id);
    return;
  }
  engine_.recorder().await_copies([&] { unit.await_update(engine_.device().compute_stream()); });
  unit.updating.clear();
}

void WeightUpdate::agree_on(const std::exception_ptr& mine) {
  try {
    if (engine_.collectives().world_size() > 1)
      agree_on_outcome(engine_.collectives(), "updating the weights",
                       mine != nullptr ? failure_of(mine) : Failure());
  } catch (...) {
    if (mine == nullptr) throw;
  }
  if (mine != nullptr) std::rethrow_exception(mine);
}

void WeightUpdate::bring_new_shards() {
  try {
    complete_slices(Changed::kTrainable);
    engine_.collectives().group_barrier();  // every shard is new before any rank gathers
    engine_.gatherer().gather_whole(Changed::kTrainable, /*late=*/true);
  } catch (const CommError&) {
    throw;  // the others know already
  } catch (const std::exception& error) {
    engine_.collectives().abort(fmt::format("its update of the weights failed: {}", error.what()));
    throw;
  }
}

}  // namespace strata::engine
