#include "strata/engine/schedule/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// DeepSpeed replaces the second beta together with the first.
constexpr double kCycledBeta2 = 0.99;

// A number of steps in a formula.
double as_double(std::int64_t steps) {
  return static_cast<double>(steps);
}

// A warm-up has two steps at least: the logarithm of one step is 0, and it is divided by.
std::int64_t steps_of_warmup(std::int64_t steps) {
  return std::max<std::int64_t>(2, steps);
}

// How far a warm-up of `steps` has come, 0 to 1, by logarithm or line; absent: it is over.
// `iteration` is >= 0.
std::optional<double> progress(std::int64_t steps, WarmupShape shape, std::int64_t iteration) {
  if (iteration >= steps) return std::nullopt;
  if (shape == WarmupShape::kLinear) return as_double(iteration) / as_double(steps);
  return 1.0 / std::log(as_double(steps)) * std::log(as_double(iteration + 1));
}

// With `total_steps`, WarmupDecayLR.
Schedule warmup_lr(const WarmupLrParams& params, std::optional<std::int64_t> total_steps,
                   const ScheduledOptimizer& optimizer) {
  const std::size_t groups = optimizer.group_lrs.size();
  const auto min_lrs = params.min_lr.spread(groups, "scheduler.params.warmup_min_lr");
  auto deltas = params.max_lr ? params.max_lr->spread(groups, "scheduler.params.warmup_max_lr")
                              : optimizer.group_lrs;
  for (std::size_t g = 0; g < groups; ++g) deltas[g] -= min_lrs[g];
  const std::int64_t warmup = steps_of_warmup(params.warmup_steps);
  // The share of the way to max_lr once the warm-up is over.
  const auto share_after = [=](std::int64_t iteration) {
    if (!total_steps) return 1.0;
    const double left = as_double(*total_steps - iteration);
    return std::max(0.0, left / std::max(1.0, as_double(*total_steps - warmup)));
  };
  return [=, shape = params.shape](std::int64_t iteration) -> Rates {
    std::vector<double> lrs = min_lrs;
    if (iteration < 0) return {lrs};
    const std::optional<double> begun = progress(warmup, shape, iteration);
    const double share = begun ? *begun : share_after(iteration);
    for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += deltas[g] * share;
    return {lrs};
  };
}

Schedule schedule_of(const WarmupLrParams& params, const ScheduledOptimizer& optimizer) {
  return warmup_lr(params, std::nullopt, optimizer);
}

Schedule schedule_of(const WarmupDecayLrParams& params, const ScheduledOptimizer& optimizer) {
  return warmup_lr(params.warmup, params.total_steps, optimizer);
}

Schedule schedule_of(const WarmupCosineLrParams& params, const ScheduledOptimizer& optimizer) {
  const std::int64_t warmup = steps_of_warmup(params.warmup_steps);
  const auto ratio = [=](std::int64_t iteration) {
    if (iteration < 0) return 0.0;
    if (const auto begun = progress(warmup, params.shape, iteration))
      return params.min_ratio + *begun * (1.0 - params.min_ratio);
    const double step = as_double(iteration - warmup + 1);
    const double steps = as_double(std::max<std::int64_t>(1, params.total_steps - warmup));
    const double wave = (1.0 + std::cos(std::numbers::pi * std::min(1.0, step / steps))) / 2.0;
    return std::max(0.0, params.cos_min_ratio + (1.0 - params.cos_min_ratio) * wave);
  };
  return [=, group_lrs = optimizer.group_lrs](std::int64_t iteration) -> Rates {
    std::vector<double> lrs = group_lrs;
    for (double& lr : lrs) lr *= ratio(iteration);
    return {lrs};
  };
}

class OneCycle {
 public:
  OneCycle(const OneCycleParams& params, const ScheduledOptimizer& optimizer)
      : params_(params),
        second_step_size_(params.second_step_size.value_or(params.first_step_size)),
        total_size_(params.first_step_size + second_step_size_),
        cycles_momentum_(params.cycle_momentum && optimizer.has_betas) {
    if (params.first_step_size <= 0 || second_step_size_ < 0)
      throw ConfigError(
          "scheduler.params.cycle_first_step_size must be > 0 and cycle_second_step_size >= 0; "
          "found {} and {}",
          params.first_step_size, second_step_size_);
    const std::size_t groups = optimizer.group_lrs.size();
    min_lrs_ = params.min_lr.spread(groups, "scheduler.params.cycle_min_lr");
    max_lrs_ = params.max_lr.spread(groups, "scheduler.params.cycle_max_lr");
    if (!cycles_momentum_) return;
    min_momenta_ = params.min_momentum.spread(groups, "scheduler.params.cycle_min_mom");
    max_momenta_ = params.max_momentum.spread(groups, "scheduler.params.cycle_max_mom");
  }

  Rates operator()(std::int64_t iteration) const {
    const bool in_cycle = as_double(iteration) < total_size_;
    const double h = in_cycle ? height(iteration) : 0.0;
    Rates rates{min_lrs_};
    for (std::size_t g = 0; g < min_lrs_.size(); ++g) {
      if (in_cycle)
        rates.lrs[g] += (max_lrs_[g] - min_lrs_[g]) * h;
      else if (params_.decay_step_size != 0.0 && params_.decay_lr_rate != 0.0)
        rates.lrs[g] /= 1.0 + params_.decay_lr_rate * decays(iteration);
    }
    if (!cycles_momentum_) return rates;
    rates.betas.emplace();
    for (std::size_t g = 0; g < min_momenta_.size(); ++g) {
      double momentum = max_momenta_[g];
      if (iteration < 0)
        momentum = min_momenta_[g];
      else if (in_cycle)
        momentum -= (max_momenta_[g] - min_momenta_[g]) * h;
      else if (params_.decay_step_size != 0.0 && params_.decay_momentum_rate != 0.0)
        momentum *= 1.0 + params_.decay_momentum_rate * decays(iteration);
      rates.betas->push_back({momentum, kCycledBeta2});
    }
    return rates;
  }

 private:
  // 0 at the lowest, 1 at the highest rate.
  double height(std::int64_t iteration) const {
    const double batch = as_double(iteration + 1);
    const double first = params_.first_step_size;
    const double ratio = first / total_size_;
    const double cycle = std::floor(1.0 + batch / total_size_);
    const double x = 1.0 + batch / total_size_ - cycle;
    const bool rising = x <= ratio;
    const std::int64_t stairs =
        rising ? params_.first_stair_count
               : params_.second_stair_count.value_or(params_.first_stair_count);
    if (stairs <= 0) return rising ? x / ratio : (x - 1.0) / (ratio - 1.0);
    // Stairs are counted from whole steps: the quotient above may lie a hair below a stair.
    const double step = std::fmod(batch, total_size_);
    const double position = step <= first
                                ? step * as_double(stairs) / first
                                : (total_size_ - step) * as_double(stairs) / second_step_size_;
    return std::floor(position) / as_double(stairs);
  }

  // Decay steps since the cycle ended.
  double decays(std::int64_t iteration) const {
    return (as_double(iteration) - total_size_ + 1.0) / params_.decay_step_size;
  }

  OneCycleParams params_;
  double second_step_size_;
  double total_size_;
  bool cycles_momentum_;
  std::vector<double> min_lrs_, max_lrs_, min_momenta_, max_momenta_;
};

Schedule schedule_of(const OneCycleParams& params, const ScheduledOptimizer& optimizer) {
  return OneCycle(params, optimizer);
}

Schedule schedule_of(const LrRangeTestParams& params, const ScheduledOptimizer& optimizer) {
  const auto min_lrs =
      params.min_lr.spread(optimizer.group_lrs.size(), "scheduler.params.lr_range_test_min_lr");
  if (params.step_size <= 0)
    throw ConfigError("scheduler.params.lr_range_test_step_size must be > 0; found {}",
                      params.step_size);
  return [=](std::int64_t iteration) -> Rates {
    double intervals = as_double(iteration + 1) / as_double(params.step_size);
    if (params.staircase) intervals = std::floor(intervals);
    std::vector<double> lrs = min_lrs;
    for (double& lr : lrs) lr *= 1.0 + params.step_rate * intervals;
    return {lrs};
  };
}

}  // namespace

std::vector<double> PerGroup::spread(std::size_t groups, std::string_view path) const {
  if (scalar) return std::vector<double>(groups, values.at(0));
  if (values.size() != groups)
    throw ConfigError(
        "{}: wanted one number for each of the {} parameter groups; found a list of {}", path,
        groups, values.size());
  return values;
}

Schedule make_schedule(const ScheduleParams& params, const ScheduledOptimizer& optimizer) {
  return std::visit([&](const auto& of_kind) { return schedule_of(of_kind, optimizer); }, params);
}

Scheduler::Scheduler(Schedule schedule, std::int64_t last_iteration)
    : schedule_(std::move(schedule)), last_iteration_(last_iteration) {
  STRATA_ASSERT(schedule_ != nullptr);
  set_last_iteration(last_iteration);
}

void Scheduler::set_last_iteration(std::int64_t iteration) {
  if (iteration < kStart)
    throw UsageError(
        "a scheduler's last_batch_iteration is -1 (not begun) or a step counted from 0; found {}",
        iteration);
  last_iteration_ = iteration;
}

}  // namespace strata::engine
