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

// How far the warm-up has come, 0 to 1, by logarithm or line. It has two steps at least: the
// logarithm of one step is 0, and it is divided by.
class Warmup {
 public:
  Warmup(std::int64_t steps, WarmupShape shape)
      : steps_(std::max<std::int64_t>(2, steps)),
        shape_(shape),
        inverse_log_(1.0 / std::log(as_double(steps_))) {}

  std::int64_t steps() const { return steps_; }
  bool covers(std::int64_t iteration) const { return iteration < steps_; }
  // `iteration` is >= 0, and covered.
  double progress(std::int64_t iteration) const {
    if (shape_ == WarmupShape::kLinear) return as_double(iteration) / as_double(steps_);
    return inverse_log_ * std::log(as_double(iteration + 1));
  }

 private:
  std::int64_t steps_;
  WarmupShape shape_;
  double inverse_log_;
};

// WarmupLR; with `total_steps`, WarmupDecayLR.
class WarmupLr final : public Schedule {
 public:
  WarmupLr(const WarmupLrParams& params, std::optional<std::int64_t> total_steps,
           const ScheduledOptimizer& optimizer)
      : warmup_(params.warmup_steps, params.shape), total_steps_(total_steps) {
    const std::size_t groups = optimizer.group_lrs.size();
    min_lrs_ = params.min_lr.spread(groups, "scheduler.params.warmup_min_lr");
    delta_lrs_ = params.max_lr ? params.max_lr->spread(groups, "scheduler.params.warmup_max_lr")
                               : optimizer.group_lrs;
    for (std::size_t g = 0; g < groups; ++g) delta_lrs_[g] -= min_lrs_[g];
  }

  std::vector<double> lrs(std::int64_t iteration) const override {
    if (iteration < 0) return min_lrs_;
    const double share =
        warmup_.covers(iteration) ? warmup_.progress(iteration) : share_after(iteration);
    std::vector<double> lrs = min_lrs_;
    for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += delta_lrs_[g] * share;
    return lrs;
  }

 private:
  // The share of the way from min_lr to max_lr once the warm-up is over.
  double share_after(std::int64_t iteration) const {
    if (!total_steps_) return 1.0;
    const double left = as_double(*total_steps_ - iteration);
    return std::max(0.0, left / std::max(1.0, as_double(*total_steps_ - warmup_.steps())));
  }

  Warmup warmup_;
  std::optional<std::int64_t> total_steps_;
  std::vector<double> min_lrs_;
  std::vector<double> delta_lrs_;
};

class WarmupCosineLr final : public Schedule {
 public:
  WarmupCosineLr(const WarmupCosineLrParams& params, const ScheduledOptimizer& optimizer)
      : params_(params),
        warmup_(params.warmup_steps, params.shape),
        group_lrs_(optimizer.group_lrs) {}

  std::vector<double> lrs(std::int64_t iteration) const override {
    const double share = ratio(iteration);
    std::vector<double> lrs = group_lrs_;
    for (double& lr : lrs) lr *= share;
    return lrs;
  }

 private:
  double ratio(std::int64_t iteration) const {
    if (iteration < 0) return 0.0;
    if (warmup_.covers(iteration)) {
      return params_.min_ratio + warmup_.progress(iteration) * (1.0 - params_.min_ratio);
    }
    const double step = as_double(iteration - warmup_.steps() + 1);
    const double steps =
        as_double(std::max<std::int64_t>(1, params_.total_steps - warmup_.steps()));
    const double wave = (1.0 + std::cos(std::numbers::pi * std::min(1.0, step / steps))) / 2.0;
    return std::max(0.0, params_.cos_min_ratio + (1.0 - params_.cos_min_ratio) * wave);
  }

  WarmupCosineLrParams params_;
  Warmup warmup_;
  std::vector<double> group_lrs_;
};

class OneCycle final : public Schedule {
 public:
  OneCycle(const OneCycleParams& params, const ScheduledOptimizer& optimizer)
      : params_(params),
        second_step_size_(params.second_step_size.value_or(params.first_step_size)),
        total_size_(params.first_step_size + second_step_size_),
        second_stair_count_(params.second_stair_count.value_or(params.first_stair_count)),
        cycles_momentum_(params.cycle_momentum && optimizer.has_betas) {
    if (params.first_step_size <= 0 || second_step_size_ < 0) {
      throw ConfigError(
          fmt::format("scheduler.params.cycle_first_step_size must be > 0 and "
                      "cycle_second_step_size >= 0; found {} and {}",
                      params.first_step_size, second_step_size_));
    }
    const std::size_t groups = optimizer.group_lrs.size();
    min_lrs_ = params.min_lr.spread(groups, "scheduler.params.cycle_min_lr");
    max_lrs_ = params.max_lr.spread(groups, "scheduler.params.cycle_max_lr");
    if (!cycles_momentum_) return;
    min_momenta_ = params.min_momentum.spread(groups, "scheduler.params.cycle_min_mom");
    max_momenta_ = params.max_momentum.spread(groups, "scheduler.params.cycle_max_mom");
  }

  std::vector<double> lrs(std::int64_t iteration) const override {
    std::vector<double> lrs = min_lrs_;
    if (in_cycle(iteration)) {
      const double h = height(iteration);
      for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += (max_lrs_[g] - min_lrs_[g]) * h;
    } else if (params_.decay_step_size != 0.0 && params_.decay_lr_rate != 0.0) {
      for (double& lr : lrs) lr /= 1.0 + params_.decay_lr_rate * decays(iteration);
    }
    return lrs;
  }

  std::optional<std::vector<Betas>> betas(std::int64_t iteration) const override {
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

 private:
  bool in_cycle(std::int64_t iteration) const { return as_double(iteration) < total_size_; }

  // 0 at the lowest, 1 at the highest rate.
  double height(std::int64_t iteration) const {
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

  // Decay steps since the cycle ended.
  double decays(std::int64_t iteration) const {
    return (as_double(iteration) - total_size_ + 1.0) / params_.decay_step_size;
  }

  OneCycleParams params_;
  double second_step_size_;
  double total_size_;
  std::int64_t second_stair_count_;
  bool cycles_momentum_;
  std::vector<double> min_lrs_;
  std::vector<double> max_lrs_;
  std::vector<double> min_momenta_;
  std::vector<double> max_momenta_;
};

class LrRangeTest final : public Schedule {
 public:
  LrRangeTest(const LrRangeTestParams& params, const ScheduledOptimizer& optimizer)
      : params_(params),
        min_lrs_(params.min_lr.spread(optimizer.group_lrs.size(),
                                      "scheduler.params.lr_range_test_min_lr")) {
    if (params.step_size <= 0) {
      throw ConfigError(fmt::format(
          "scheduler.params.lr_range_test_step_size must be > 0; found {}", params.step_size));
    }
  }

  std::vector<double> lrs(std::int64_t iteration) const override {
    double intervals = as_double(iteration + 1) / as_double(params_.step_size);
    if (params_.staircase) intervals = std::floor(intervals);
    std::vector<double> lrs = min_lrs_;
    for (double& lr : lrs) lr *= 1.0 + params_.step_rate * intervals;
    return lrs;
  }

 private:
  LrRangeTestParams params_;
  std::vector<double> min_lrs_;
};

// The schedule of each kind of parameters.
struct Maker {
  const ScheduledOptimizer& optimizer;

  std::unique_ptr<Schedule> operator()(const WarmupLrParams& p) const {
    return std::make_unique<WarmupLr>(p, std::nullopt, optimizer);
  }
  std::unique_ptr<Schedule> operator()(const WarmupDecayLrParams& p) const {
    return std::make_unique<WarmupLr>(p.warmup, p.total_steps, optimizer);
  }
  std::unique_ptr<Schedule> operator()(const WarmupCosineLrParams& p) const {
    return std::make_unique<WarmupCosineLr>(p, optimizer);
  }
  std::unique_ptr<Schedule> operator()(const OneCycleParams& p) const {
    return std::make_unique<OneCycle>(p, optimizer);
  }
  std::unique_ptr<Schedule> operator()(const LrRangeTestParams& p) const {
    return std::make_unique<LrRangeTest>(p, optimizer);
  }
};

}  // namespace

std::vector<double> PerGroup::spread(std::size_t groups, std::string_view path) const {
  if (scalar) return std::vector<double>(groups, values.at(0));
  if (values.size() != groups) {
    throw ConfigError(
        fmt::format("{}: wanted one number for each of the {} parameter groups; found a list of {}",
                    path, groups, values.size()));
  }
  return values;
}

std::unique_ptr<Schedule> make_schedule(const ScheduleParams& params,
                                        const ScheduledOptimizer& optimizer) {
  return std::visit(Maker{optimizer}, params);
}

Scheduler::Scheduler(std::unique_ptr<Schedule> schedule, std::int64_t last_iteration)
    : schedule_(std::move(schedule)), last_iteration_(last_iteration) {
  STRATA_ASSERT(schedule_ != nullptr);
  set_last_iteration(last_iteration);
}

std::optional<Rates> Scheduler::initial() const {
  if (last_iteration_ != kStart) return std::nullopt;
  return current();
}

Rates Scheduler::step_to(std::int64_t iteration) {
  set_last_iteration(iteration);
  return current();
}

void Scheduler::set_last_iteration(std::int64_t iteration) {
  if (iteration < kStart) {
    throw UsageError(fmt::format(
        "a scheduler's last_batch_iteration is -1 (not begun) or a step counted from 0; found {}",
        iteration));
  }
  last_iteration_ = iteration;
}

}  // namespace strata::engine
