// Engine's step: from reduced gradients to new weights on every rank.
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/engine.h"

namespace strata::engine {
namespace {

// Units are fetched in runs of so much: each costs a meeting of the ranks.
constexpr Bytes kFetchedTogether = 64_MiB;

// Units by number, as ranks tell each other.
std::string text_of(std::span<const int> units) {
  return fmt::format("{}", fmt::join(units, " "));
}

std::vector<int> units_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<int>(words), std::istream_iterator<int>()};
}

}  // namespace

void Engine::reduce_late() {
  // Which units are late is known to each rank only for itself; all must reduce the union.
  std::vector<bool> late(weights_.units().size());
  for (const std::string& text : collectives_->all_gather_text(text_of(reducer_.late_units()))) {
    for (const int unit : units_of(text)) late[static_cast<std::size_t>(unit)] = true;
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
  const std::vector<std::string> names = collectives_->all_gather_text(
      param >= 0 ? fmt::format("'{}'", weights_.param(param).name) : "");
  const std::size_t first = comm::first_to_say(names).value();
  zero_gradients();
  throw UsageError(
      fmt::format("a trainable parameter got no gradient in this step, which "
                  "zero_optimization.ignore_unused_parameters=false makes an error; use it in the "
                  "loss, freeze it, or allow it. The step's gradients are dropped. First: {} on "
                  "rank {}",
                  names[first], first));
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
  const std::vector<std::string> texts = collectives_->all_gather_text(
      mine < 0 ? "" : weights_.units()[static_cast<std::size_t>(mine)].name());
  // Of finite gradients, too, the squares may add up to more than a number can be.
  const std::optional<std::size_t> first = comm::first_to_say(texts);
  const std::string where =
      first ? fmt::format("unit '{}' in the shard of rank {}", texts[*first], *first)
            : "none; their norm is too large for a number";
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

// What the next forward of every rank needs first, in the order of all. Of a unit that only some
// of them need the others say nothing when they have updated it.
std::vector<int> Engine::first_needed_by_all() {
  std::vector<int> common = gatherer_.first_needed();
  for (const std::string& text : collectives_->all_gather_text(text_of(common))) {
    const std::vector<int> theirs = units_of(text);
    const auto end = std::ranges::mismatch(common, theirs).in1;
    common.erase(end, common.end());
  }
  return common;
}

// What the next forward needs first is updated first, and fetched while the rest is updated.
void Engine::update_and_fetch(std::span<const GroupScalars> groups, const GradientScale& scale) {
  const bool one_sided = collectives_->one_sided();
  const std::vector<int> first = one_sided ? first_needed_by_all() : std::vector<int>();
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
    const float scale = kernels::scale_of(last_.norm, loss_scale, options_.gradient_clipping);
    if (result.applied) update_weights(groups, {scale, nullptr});
  }
  zero_gradients();
  trace_.end_step(recorder_, *collectives_);
  return result;
}

// What is not finite must be noticed by the update itself: where it is to be skipped the loss scale
// depends on that, and where it is to be applied there is nothing to notice.
bool Engine::norm_may_be_late(bool skip_on_overflow) const {
  return options_.wants_late_norm(device_->runs_ahead()) && !skip_on_overflow &&
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
