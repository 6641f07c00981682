#include "strata/engine/reduce/gradient_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// Numbers at the beginning of a rank's text; parameters without a gradient follow.
enum Fact : std::uint8_t { kLate, kUnused, kReads, kDropped, kFacts };

bool any_has(std::span<const std::vector<int>> ranks, Fact fact) {
  return std::ranges::any_of(ranks, [fact](const auto& rank) { return rank[fact] != 0; });
}

}  // namespace

GradientCheck::GradientCheck(Reducer& reducer, Weights& weights, comm::Collectives& collectives,
                             device::Device& device, StepRecorder& recorder,
                             const EngineOptions& options)
    : reducer_(reducer),
      weights_(weights),
      collectives_(collectives),
      device_(device),
      recorder_(recorder),
      options_(options),
      norm_(collectives, device, reducer.shards()),
      whole_(reducer, weights.units(), collectives, device) {}

// Where overflow is allowed the host has to know of it: the loss scale depends on it.
GradientCheck::Outcome GradientCheck::check(double loss_scale, bool allows_overflow, bool late) {
  const auto span = recorder_.begin(Activity::kNorm, -1);
  agree();
  if (late && options_.wants_late_norm(device_.runs_ahead()) && !allows_overflow &&
      norm_.available()) {
    norm_.begin(loss_scale, options_.gradient_clipping);
    recorder_.end(span);
    if (!options_.check_finite)  // nothing depends on the norm
      return {true, std::nullopt, kernels::scale_of(0.0, loss_scale, 0.0)};
    return {true, std::nullopt, 1.0F, norm_.factor(), norm_.factor_on_host()};
  }
  last_finding_ = measure(loss_scale);
  recorder_.end(span);
  recorder_.record_idle();
  applied_ = !skips(allows_overflow);
  if (!applied_) ++skipped_;
  return {applied_, last_finding_.norm,
          kernels::scale_of(last_finding_.norm, loss_scale, options_.gradient_clipping)};
}

void GradientCheck::read(int unit, const WholeGradients::Take& take) {
  if (collectives_.world_size() == 1) return whole_.take_shard(unit, take);
  exchange(/*reads=*/true);
  whole_.gather(take);
}

// Counts the last step if its gradients were not finite; throws if too many in a row were skipped.
bool GradientCheck::skips(bool allows_overflow) {
  if (last_finding_.finite) in_a_row_ = 0;
  if (last_finding_.finite || allows_overflow) return !last_finding_.finite;
  if (!options_.check_finite) return false;
  ++in_a_row_;
  report_not_finite(/*late=*/false);
  return true;
}

std::vector<std::vector<int>> GradientCheck::exchange(bool reads) {
  const GradientRecord& record = reducer_.record();
  std::vector<int> mine(kFacts);
  mine[kLate] = reducer_.late_units().empty() ? 0 : 1;
  mine[kUnused] = record.unused() >= 0 ? 1 : 0;
  mine[kReads] = reads ? 1 : 0;
  mine[kDropped] = std::bit_cast<int>(record.dropped());
  const std::vector<int> without = reducer_.params_without_gradient();
  mine.insert(mine.end(), without.begin(), without.end());
  std::vector<std::vector<int>> ranks;
  for (const std::string& text : collectives_.all_gather_text(text_of_numbers(mine)))
    ranks.push_back(numbers_of_text(text));
  return ranks;
}

// It is also the synchronisation before the shards change: each rank that takes part has finished
// its gathers.
void GradientCheck::agree() {
  reducer_.complete_groups();
  std::vector<std::vector<int>> ranks = exchange(/*reads=*/false);
  for (; any_has(ranks, kReads); ranks = exchange(/*reads=*/false)) whole_.gather({});
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (ranks[rank][kDropped] != ranks[0][kDropped]) report_unlike_drops(rank);
  }
  if (any_has(ranks, kUnused) && !options_.allow_unused) report_unused();
  std::vector<int> without(ranks[0].begin() + kFacts, ranks[0].end());
  for (const std::vector<int>& theirs : ranks) {
    std::erase_if(without, [&](int param) {
      return !std::binary_search(theirs.begin() + kFacts, theirs.end(), param);
    });
  }
  leave_out(std::move(without));
  if (any_has(ranks, kLate)) reducer_.reduce_late();
}

// Parameters that are frozen beside unfrozen ones stay unchanged in any case.
void GradientCheck::leave_out(std::vector<int> params) {
  if (options_.decay_unused)
    std::erase_if(params, [this](int param) { return weights_.param(param).trainable; });
  reducer_.shards().leave_out(std::move(params));
}

GradientCheck::Finding GradientCheck::measure(double loss_scale) {
  double values[] = {0.0, 0.0};  // squares, and units that are not finite
  for (const double squares : reducer_.shards().sums_of_squares()) {
    values[0] += squares;
    if (!std::isfinite(squares)) values[1] += 1.0;
  }
  // Every group has all shards: those of the first one count.
  if (collectives_.shard_position().group > 0) values[0] = 0.0;
  collectives_.all_reduce(values, comm::ReduceOp::kSum);
  const bool finite = values[1] == 0.0;
  const double norm =
      finite ? kernels::norm_of(values[0], loss_scale) : std::numeric_limits<double>::infinity();
  return {norm, finite};
}

// Reports the step that is being checked or, if `late`, the one before.
void GradientCheck::report_not_finite(bool late) {
  const bool one_too_many = in_a_row_ > options_.max_skipped_steps;
  if (!one_too_many && std::exchange(warned_, true)) return;
  const std::vector<double> sums =
      late ? norm_.sums_of_squares() : reducer_.shards().sums_of_squares();
  const auto bad = std::ranges::find_if(sums, [](double sum) { return !std::isfinite(sum); });
  const std::vector<std::string> texts = collectives_.all_gather_text(
      bad == sums.end() ? ""
                        : weights_.units()[static_cast<std::size_t>(bad - sums.begin())].name());
  // Even if all gradients are finite, the sum of their squares may be too large for a number.
  const std::optional<std::size_t> first = comm::first_text(texts);
  const std::string where =
      first ? fmt::format("unit '{}' in the shard of rank {}", texts[*first], *first)
            : "none; their norm is too large for a number";
  const std::string what =
      fmt::format("the gradients of {} are not finite (NaN or infinity; usually the loss was)",
                  late ? "the last step" : "this step");
  if (!one_too_many) {
    warning_ = fmt::format(
        "{}, so the step is skipped: weights, optimizer and scheduler do not change. This message "
        "comes once; skipped_steps counts such steps, and more than {} in a row "
        "(strata.max_skipped_steps) are an error. First found in: {}",
        what, options_.max_skipped_steps, where);
    return;
  }
  reducer_.drop_gradients();
  const std::string before =
      options_.max_skipped_steps == 0
          ? ""
          : fmt::format(
                ", after {} steps in a row that were skipped for that reason "
                "(strata.max_skipped_steps)",
                options_.max_skipped_steps);
  throw NumericsError(
      "{}{}. The weights are unchanged and the step's gradients are dropped, so training may go on "
      "with other data or a lower learning rate. First found in: {}",
      what, before, where);
}

void GradientCheck::report_unused() {
  const int param = reducer_.record().unused();
  const std::vector<std::string> names = collectives_.all_gather_text(
      param >= 0 ? fmt::format("'{}'", weights_.param(param).name) : "");
  const std::size_t first = comm::first_text(names).value();
  reducer_.drop_gradients();
  throw UsageError(
      "a trainable parameter got no gradient in this step, which "
      "zero_optimization.ignore_unused_parameters=false makes an error; use it in the loss, freeze "
      "it, or allow it. The step's gradients are dropped. First: {} on rank {}",
      names[first], first);
}

void GradientCheck::report_unlike_drops(std::size_t rank) {
  reducer_.drop_gradients();
  throw UsageError(
      "ranks have dropped different gradients of this step with zero_grad() or p.grad = None, "
      "after they were reduced, so that each rank holds a part of other sums. Drop the same on "
      "every rank, or what was not reduced yet (within no_sync(), or with strata.reduce_at: "
      "\"boundary\"). The step's gradients are dropped and the weights are unchanged. Rank {} "
      "differs from rank 0",
      rank);
}

void GradientCheck::look_at_norm() {
  if (!norm_.begun()) return;
  last_finding_ = norm_.finish();
  applied_ = last_finding_.finite || !options_.check_finite;
  if (!last_finding_.finite) last_finding_.norm = std::numeric_limits<double>::infinity();
  if (applied_) {
    in_a_row_ = 0;
    return;
  }
  ++in_a_row_;
  ++skipped_;
  notify_late_ = true;
}

void GradientCheck::set_skipped_steps(std::int64_t steps) {
  look_at_norm();
  skipped_ = steps;
  in_a_row_ = 0;
  applied_ = true;
  notify_late_ = false;
}

void GradientCheck::notify_late() {
  notify_late_ = false;
  report_not_finite(/*late=*/true);
}

}  // namespace strata::engine
