#include "strata/engine/schedule/warmup_schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace strata::engine {
namespace {

// Two steps at least: the logarithm of one step is 0, and it is divided by.
constexpr std::int64_t kFewestSteps = 2;

}  // namespace

Warmup::Warmup(std::int64_t steps, WarmupShape shape)
    : steps_(std::max(kFewestSteps, steps)),
      shape_(shape),
      inverse_log_(1.0 / std::log(as_double(steps_))) {}

double Warmup::progress(std::int64_t iteration) const {
  if (shape_ == WarmupShape::kLinear) return as_double(iteration) / as_double(steps_);
  return inverse_log_ * std::log(as_double(iteration + 1));
}

WarmupLr::WarmupLr(const WarmupLrParams& params, const ScheduledOptimizer& optimizer)
    : warmup_(params.warmup_steps, params.shape) {
  const std::size_t groups = optimizer.group_lrs.size();
  min_lrs_ = params.min_lr.spread(groups, "scheduler.params.warmup_min_lr");
  delta_lrs_ = params.max_lr ? params.max_lr->spread(groups, "scheduler.params.warmup_max_lr")
                             : optimizer.group_lrs;
  for (std::size_t g = 0; g < groups; ++g) delta_lrs_[g] -= min_lrs_[g];
}

std::vector<double> WarmupLr::lrs(std::int64_t iteration) const {
  if (iteration < 0) return min_lrs_;
  const double share =
      warmup_.covers(iteration) ? warmup_.progress(iteration) : share_after(iteration);
  std::vector<double> lrs = min_lrs_;
  for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += delta_lrs_[g] * share;
  return lrs;
}

double WarmupLr::share_after(std::int64_t) const {
  return 1.0;
}

WarmupDecayLr::WarmupDecayLr(const WarmupDecayLrParams& params, const ScheduledOptimizer& optimizer)
    : WarmupLr(params.warmup, optimizer), total_steps_(params.total_steps) {}

double WarmupDecayLr::share_after(std::int64_t iteration) const {
  const double left = as_double(total_steps_ - iteration);
  return std::max(0.0, left / std::max(1.0, as_double(total_steps_ - warmup().steps())));
}

WarmupCosineLr::WarmupCosineLr(const WarmupCosineLrParams& params,
                               const ScheduledOptimizer& optimizer)
    : params_(params),
      warmup_(params.warmup_steps, params.shape),
      group_lrs_(optimizer.group_lrs) {}

double WarmupCosineLr::ratio(std::int64_t iteration) const {
  if (iteration < 0) return 0.0;
  if (warmup_.covers(iteration)) {
    return params_.min_ratio + warmup_.progress(iteration) * (1.0 - params_.min_ratio);
  }
  const double step = as_double(iteration - warmup_.steps() + 1);
  const double steps = as_double(std::max<std::int64_t>(1, params_.total_steps - warmup_.steps()));
  const double wave = (1.0 + std::cos(std::numbers::pi * std::min(1.0, step / steps))) / 2.0;
  return std::max(0.0, params_.cos_min_ratio + (1.0 - params_.cos_min_ratio) * wave);
}

std::vector<double> WarmupCosineLr::lrs(std::int64_t iteration) const {
  const double share = ratio(iteration);
  std::vector<double> lrs = group_lrs_;
  for (double& lr : lrs) lr *= share;
  return lrs;
}

}  // namespace strata::engine
