#include "strata/engine/schedule/cycle_schedules.h"

#include <cmath>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// DeepSpeed replaces the second beta together with the first.
constexpr double kCycledBeta2 = 0.99;

}  // namespace

OneCycle::OneCycle(const OneCycleParams& params, const ScheduledOptimizer& optimizer)
    : params_(params),
      second_step_size_(params.second_step_size.value_or(params.first_step_size)),
      total_size_(params.first_step_size + second_step_size_),
      second_stair_count_(params.second_stair_count.value_or(params.first_stair_count)),
      cycles_momentum_(params.cycle_momentum && optimizer.has_betas) {
  if (params.first_step_size <= 0 || second_step_size_ < 0) {
    throw ConfigError(fmt::format(
        "scheduler.params.cycle_first_step_size must be > 0 and cycle_second_step_size >= 0; found "
        "{} and {}",
        params.first_step_size, second_step_size_));
  }
  const std::size_t groups = optimizer.group_lrs.size();
  min_lrs_ = params.min_lr.spread(groups, "scheduler.params.cycle_min_lr");
  max_lrs_ = params.max_lr.spread(groups, "scheduler.params.cycle_max_lr");
  if (!cycles_momentum_) return;
  min_momenta_ = params.min_momentum.spread(groups, "scheduler.params.cycle_min_mom");
  max_momenta_ = params.max_momentum.spread(groups, "scheduler.params.cycle_max_mom");
}

bool OneCycle::in_cycle(std::int64_t iteration) const {
  return as_double(iteration) < total_size_;
}

double OneCycle::height(std::int64_t iteration) const {
  const double batch = as_double(iteration + 1);
  const double first = params_.first_step_size;
  const double ratio = first / total_size_;
  const double cycle = std::floor(1.0 + batch / total_size_);
  const double x = 1.0 + batch / total_size_ - cycle;
  const bool rising = x <= ratio;
  const std::int64_t stairs = rising ? params_.first_stair_count : second_stair_count_;
  if (stairs <= 0) return rising ? x / ratio : (x - 1.0) / (ratio - 1.0);
  // Stairs are counted from whole steps: the quotient above may lie a hair below a stair.
  const double step = std::fmod(batch, total_size_);
  const double position = step <= first
                              ? step * as_double(stairs) / first
                              : (total_size_ - step) * as_double(stairs) / second_step_size_;
  return std::floor(position) / as_double(stairs);
}

double OneCycle::decays(std::int64_t iteration) const {
  return (as_double(iteration) - total_size_ + 1.0) / params_.decay_step_size;
}

std::vector<double> OneCycle::lrs(std::int64_t iteration) const {
  std::vector<double> lrs = min_lrs_;
  if (in_cycle(iteration)) {
    const double h = height(iteration);
    for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += (max_lrs_[g] - min_lrs_[g]) * h;
  } else if (params_.decay_step_size != 0.0 && params_.decay_lr_rate != 0.0) {
    for (double& lr : lrs) lr /= 1.0 + params_.decay_lr_rate * decays(iteration);
  }
  return lrs;
}

std::optional<std::vector<Betas>> OneCycle::betas(std::int64_t iteration) const {
  if (!cycles_momentum_) return std::nullopt;
  std::vector<Betas> betas;
  for (std::size_t g = 0; g < min_momenta_.size(); ++g) {
    double momentum = max_momenta_[g];
    if (iteration < 0) {
      momentum = min_momenta_[g];
    } else if (in_cycle(iteration)) {
      momentum -= (max_momenta_[g] - min_momenta_[g]) * height(iteration);
    } else if (params_.decay_step_size != 0.0 && params_.decay_momentum_rate != 0.0) {
      momentum *= 1.0 + params_.decay_momentum_rate * decays(iteration);
    }
    betas.push_back({momentum, kCycledBeta2});
  }
  return betas;
}

LrRangeTest::LrRangeTest(const LrRangeTestParams& params, const ScheduledOptimizer& optimizer)
    : params_(params),
      min_lrs_(params.min_lr.spread(optimizer.group_lrs.size(),
                                    "scheduler.params.lr_range_test_min_lr")) {
  if (params.step_size <= 0) {
    throw ConfigError(fmt::format("scheduler.params.lr_range_test_step_size must be > 0; found {}",
                                  params.step_size));
  }
}

std::vector<double> LrRangeTest::lrs(std::int64_t iteration) const {
  double intervals = as_double(iteration + 1) / as_double(params_.step_size);
  if (params_.staircase) intervals = std::floor(intervals);
  std::vector<double> lrs = min_lrs_;
  for (double& lr : lrs) lr *= 1.0 + params_.step_rate * intervals;
  return lrs;
}

}  // namespace strata::engine
