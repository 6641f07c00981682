#include "strata/engine/weight_update.h"

#include <algorithm>
#include <string>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// The bytes of one round: each round costs a sync point of the ranks.
constexpr Bytes kFetchedTogether = 64_MiB;

}  // namespace

void WeightUpdate::run(ShardedOptimizer& optimizer, std::span<const GroupScalars> groups,
                       const GradientScale& scale) {
  try {
    agree_on(update_shards(optimizer, groups, scale));
    bring_new_shards();
  } catch (...) {
    // The gathers under way copy shards of a failed update. Their errors would hide the cause.
    FirstError().attempt([this] { gatherer_.abandon_lazy_gather(); });
    throw;
  }
}

bool WeightUpdate::fetches_ahead() const {
  const comm::ShardPosition place = collectives_.shard_position();
  return device_.runs_ahead() && place.held_count() > 1 && place.parts == 1 &&
         collectives_.traits().one_sided;
}

// The units that every rank's next forward needs first, in their common order. If only some ranks
// need a unit, the other ranks do not report that they have updated it.
std::vector<int> WeightUpdate::first_needed_by_all() {
  std::vector<int> common = gatherer_.first_needed();
  for (const std::string& text : collectives_.all_gather_text(text_of_numbers(common))) {
    const std::vector<int> theirs = numbers_of_text(text);
    const auto end = std::ranges::mismatch(common, theirs).in1;
    common.erase(end, common.end());
  }
  return common;
}

// Units in the order of their updates, cut into rounds.
std::vector<std::vector<int>> WeightUpdate::plan_rounds(std::span<const int> updated) const {
  std::vector<std::vector<int>> rounds;
  Bytes bytes = kFetchedTogether;  // of the last round
  for (const int index : updated) {
    if (bytes >= kFetchedTogether) {
      rounds.emplace_back();
      bytes = Bytes();
    }
    rounds.back().push_back(index);
    bytes += unit(index).layout.flat_bytes();
  }
  return rounds;
}

// Returns the exception of this rank's optimizer, since all ranks have to learn of it.
std::exception_ptr WeightUpdate::update_shards(ShardedOptimizer& optimizer,
                                               std::span<const GroupScalars> groups,
                                               const GradientScale& scale) {
  const std::vector<int> first = fetches_ahead() ? first_needed_by_all() : std::vector<int>();
  std::vector<int> order = optimizer.order(first);
  order.resize(first.size());
  const std::vector<std::vector<int>> rounds = plan_rounds(order);
  std::size_t round = 0;
  std::size_t updated = 0;  // of this round
  const auto record_updated = [&](int /*unit*/) {
    if (round == rounds.size() || ++updated < rounds[round].size()) return;
    updated = 0;
    collectives_.group_barrier();
    gatherer_.fetch_first(rounds[round++]);
  };
  try {
    run_recorded(optimizer, recorder_, groups, scale, first, record_updated);
  } catch (const CommError&) {
    throw;  // the others know already
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    // The other ranks wait at a barrier in each remaining round, and learn of the error after the
    // last one.
    FirstError().attempt([&] {
      for (; round < rounds.size(); ++round) collectives_.group_barrier();
    });
    return error;
  }
  return nullptr;
}

void WeightUpdate::agree_on(const std::exception_ptr& mine) {
  try {
    if (collectives_.world_size() > 1) {
      agree_on_outcome(collectives_, "updating the weights",
                       mine != nullptr ? failure_of(mine) : Failure());
    }
  } catch (...) {
    if (mine == nullptr) throw;
  }
  if (mine != nullptr) std::rethrow_exception(mine);
}

void WeightUpdate::bring_new_shards() {
  try {
    complete_slices(Changed::kTrainable);
    collectives_.group_barrier();  // every shard is new before any rank gathers
    gatherer_.gather_whole(Changed::kTrainable, /*late=*/true);
  } catch (const CommError&) {
    throw;  // the others know already
  } catch (const std::exception& error) {
    collectives_.abort(fmt::format("its update of the weights failed: {}", error.what()));
    throw;
  }
}

void WeightUpdate::complete_slices(std::span<const int> units) {
  if (collectives_.shard_position().parts == 1) return;
  std::vector<comm::SliceMap> slices;
  for (const int index : units) slices.push_back(unit(index).slices);
  collectives_.complete_slices(slices);
}

void WeightUpdate::complete_slices(Changed changed) {
  std::vector<int> units;
  for (const Unit& each : weights_.units()) {
    if (changed == Changed::kAll || each.trainable()) units.push_back(each.id);
  }
  complete_slices(units);
}

}  // namespace strata::engine
