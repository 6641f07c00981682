#include "strata/engine/reduce/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr std::string_view kWantsToRead = "reads";  // in place of a text of what is missing

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
      whole_(reducer, weights.units(), collectives, device),
      counts_(static_cast<std::size_t>(weights.param_count()), collectives.world_size()) {}

// Where overflow is allowed the host has to know of it: the loss scale depends on it.
GradientCheck::Outcome GradientCheck::check(double loss_scale, bool allows_overflow, bool late) {
  const auto span = recorder_.begin(Activity::kNorm, -1);
  if (takes_texts(allows_overflow, late) && agrees_in_texts()) {
    norm_.begin(loss_scale, options_.gradient_clipping);
    recorder_.end(span);
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

// Whether ranks exchange texts first, and not numbers; the same on every rank.
bool GradientCheck::takes_texts(bool allows_overflow, bool late) const {
  return late && options_.wants_late_norm(device_.runs_ahead()) && !allows_overflow &&
         norm_.available();
}

void GradientCheck::read(int unit, bool allows_overflow, bool late,
                         const WholeGradients::Take& take) {
  if (collectives_.world_size() == 1) return whole_.take_shard(unit, take);
  if (takes_texts(allows_overflow, late)) {
    collectives_.all_gather_text(std::string(kWantsToRead));
  } else {
    reducer_.complete_groups();
    totals(/*first=*/true, /*reads=*/true);
  }
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

// True: no rank has late gradients to reduce, or unused parameters to report, and all ranks know
// which parameters are left out.
bool GradientCheck::agrees_in_texts() {
  const std::string more = "more";
  const bool something = !reducer_.late_units().empty() || reducer_.record().dropped() > 0 ||
                         (reducer_.record().unused() >= 0 && !options_.allow_unused);
  std::vector<int> without = reducer_.params_without_gradient();
  const std::vector<std::string> texts =
      collectives_.all_gather_text(something ? more : text_of_numbers(without));
  if (std::ranges::find(texts, kWantsToRead) != texts.end()) {
    whole_.gather({});
    return agrees_in_texts();
  }
  if (std::ranges::find(texts, more) != texts.end()) return false;
  for (const std::string& text : texts) {
    const std::vector<int> theirs = numbers_of_text(text);
    std::erase_if(without, [&](int param) { return !std::ranges::binary_search(theirs, param); });
  }
  leave_out(std::move(without));
  return true;
}

// Parameters that are frozen beside unfrozen ones stay unchanged in any case.
void GradientCheck::leave_out(std::vector<int> params) {
  if (options_.decay_unused)
    std::erase_if(params, [this](int param) { return weights_.param(param).trainable; });
  reducer_.shards().leave_out(std::move(params));
}

// The one all-reduce of a step. It is also the synchronisation before the shards change: each rank
// that takes part has finished its gathers. `first`: late gradients are still to be reduced.
// `reads`: this rank reads the gradients, and does not step yet.
std::vector<double> GradientCheck::totals(bool first, bool reads) {
  double sum = 0.0;
  double not_finite = 0.0;
  for (const double squares : reducer_.shards().sums_of_squares()) {
    sum += squares;
    if (!std::isfinite(squares)) not_finite += 1.0;
  }
  // Every group has all shards: those of the first one count.
  if (collectives_.shard_position().group > 0) sum = 0.0;
  std::vector<double> values{sum, not_finite};
  if (first) {
    values.push_back(static_cast<double>(reducer_.late_units().size()));
    values.push_back(reducer_.record().unused() >= 0 ? 1.0 : 0.0);
    const auto dropped = static_cast<double>(reducer_.record().dropped());
    values.insert(values.end(), {reads ? 1.0 : 0.0, dropped, dropped * dropped});
    const std::vector<double> counts = counts_.ones_without(reducer_.params_without_gradient());
    values.insert(values.end(), counts.begin(), counts.end());
  }
  collectives_.all_reduce(values, comm::ReduceOp::kSum);
  // Whole numbers are equal where the square of their sum is as large as it can be.
  if (first && values[5] * values[5] != values[6] * collectives_.world_size())
    report_unlike_drops();
  return values;
}

GradientCheck::Finding GradientCheck::measure(double loss_scale) {
  reducer_.complete_groups();
  std::vector<double> values = totals(/*first=*/true);
  while (values[4] > 0.0) {
    whole_.gather({});
    values = totals(/*first=*/true);
  }
  if (values[3] > 0.0 && !options_.allow_unused) report_unused();
  leave_out(counts_.zeroes(std::span(values).subspan(7)));
  if (values[2] > 0.0) {
    reducer_.reduce_late();
    values = totals(/*first=*/false);
  }
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

void GradientCheck::report_unlike_drops() {
  const std::vector<std::string> texts =
      collectives_.all_gather_text(fmt::format("{}", reducer_.record().dropped()));
  const auto other = std::ranges::find_if(texts, [&](const auto& t) { return t != texts[0]; });
  reducer_.drop_gradients();
  throw UsageError(
      "ranks have dropped different gradients of this step with zero_grad() or p.grad = None, "
      "after they were reduced, so that each rank holds a part of other sums. Drop the same on "
      "every rank, or what was not reduced yet (within no_sync(), or with strata.reduce_at: "
      "\"boundary\"). The step's gradients are dropped and the weights are unchanged. Rank {} "
      "differs from rank 0",
      other - texts.begin());
}

void GradientCheck::look_at_norm() {
  if (!norm_.begun()) return;
  last_finding_ = norm_.finish();
  applied_ = last_finding_.finite;
  if (applied_) {
    in_a_row_ = 0;
    return;
  }
  ++in_a_row_;
  ++skipped_;
  last_finding_.norm = std::numeric_limits<double>::infinity();
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
