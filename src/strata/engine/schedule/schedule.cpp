#include "strata/engine/schedule/schedule.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// DeepSpeed replaces the second beta together with the first.
constexpr double kCycledBeta2 = 0.99;

using nlohmann::json;

// A number of steps in a formula.
double as_double(std::int64_t steps) {
  return static_cast<double>(steps);
}

// The values of a schedule, by their names in scheduler.params.
class Values {
 public:
  explicit Values(const ScheduleParams& params) : values_(json::parse(params.values)) {}

  // Absent where it is null, or no value of this type of schedule.
  template <typename T>
  std::optional<T> maybe(const char* name) const {
    const auto found = values_.find(name);
    if (found == values_.end() || found->is_null()) return std::nullopt;
    return found->get<T>();
  }
  double number(const char* name) const { return values_.at(name); }
  std::int64_t integer(const char* name) const { return values_.at(name); }
  bool flag(const char* name) const { return values_.at(name); }
  std::string text(const char* name) const { return values_.at(name); }
  // One value a parameter group: of a list, a number for all or, where it is null, the optimizer.
  std::vector<double> per_group(const char* name, const ScheduledOptimizer& optimizer) const {
    const std::size_t groups = optimizer.group_lrs.size();
    const json& value = values_.at(name);
    if (value.is_null()) return optimizer.group_lrs;
    if (value.is_number()) return std::vector<double>(groups, value.get<double>());
    if (value.size() == groups) return value;
    throw ConfigError(
        "scheduler.params.{}: wanted one number for each of the {} parameter groups; found a list "
        "of {}",
        name, groups, value.size());
  }

 private:
  json values_;
};

struct Warmup {
  explicit Warmup(const Values& values)
      : steps(std::max<std::int64_t>(2, values.integer("warmup_num_steps"))),
        linear(values.text("warmup_type") == "linear") {}

  // Its progress, 0 to 1, by logarithm or line; absent: it is over. `iteration` is >= 0.
  std::optional<double> progress(std::int64_t iteration) const {
    if (iteration >= steps) return std::nullopt;
    if (linear) return as_double(iteration) / as_double(steps);
    return 1.0 / std::log(as_double(steps)) * std::log(as_double(iteration + 1));
  }

  std::int64_t steps;  // two at least: the logarithm of one step is 0, and it is divided by
  bool linear;
};

// From the lowest rate to the highest, which then stays; WarmupDecayLR has a total of steps, at
// which a line comes back to the lowest.
Schedule warmup_lr(const Values& values, const ScheduledOptimizer& optimizer) {
  const auto min_lrs = values.per_group("warmup_min_lr", optimizer);
  auto deltas = values.per_group("warmup_max_lr", optimizer);
  for (std::size_t g = 0; g < deltas.size(); ++g) deltas[g] -= min_lrs[g];
  const Warmup warmup(values);
  const auto total_steps = values.maybe<std::int64_t>("total_num_steps");
  // The share of the way to the highest rate once the warm-up is over.
  const auto share_after = [=](std::int64_t iteration) {
    if (!total_steps) return 1.0;
    const double left = as_double(*total_steps - iteration);
    return std::max(0.0, left / std::max(1.0, as_double(*total_steps - warmup.steps)));
  };
  return [=](std::int64_t iteration) -> Rates {
    std::vector<double> lrs = min_lrs;
    if (iteration < 0) return {lrs};
    const std::optional<double> begun = warmup.progress(iteration);
    const double share = begun ? *begun : share_after(iteration);
    for (std::size_t g = 0; g < lrs.size(); ++g) lrs[g] += deltas[g] * share;
    return {lrs};
  };
}

// From a share of each group's own rate to that rate, then by a cosine to another share.
Schedule warmup_cosine_lr(const Values& values, const ScheduledOptimizer& optimizer) {
  const auto ratio = [warmup = Warmup(values), total_steps = values.integer("total_num_steps"),
                      min_ratio = values.number("warmup_min_ratio"),
                      cos_min_ratio = values.number("cos_min_ratio")](std::int64_t iteration) {
    if (iteration < 0) return 0.0;
    if (const auto begun = warmup.progress(iteration))
      return min_ratio + *begun * (1.0 - min_ratio);
    const double step = as_double(iteration - warmup.steps + 1);
    const double steps = as_double(std::max<std::int64_t>(1, total_steps - warmup.steps));
    const double wave = (1.0 + std::cos(std::numbers::pi * std::min(1.0, step / steps))) / 2.0;
    return std::max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * wave);
  };
  return [=, group_lrs = optimizer.group_lrs](std::int64_t iteration) -> Rates {
    std::vector<double> lrs = group_lrs;
    for (double& lr : lrs) lr *= ratio(iteration);
    return {lrs};
  };
}

// Up, down, then decay (Smith 2018).
class OneCycle {
 public:
  OneCycle(const Values& values, const ScheduledOptimizer& optimizer)
      : first_step_size_(values.number("cycle_first_step_size")),
        second_step_size_(
            values.maybe<double>("cycle_second_step_size").value_or(first_step_size_)),
        total_size_(first_step_size_ + second_step_size_),
        first_stairs_(values.integer("cycle_first_stair_count")),
        second_stairs_(
            values.maybe<std::int64_t>("cycle_second_stair_count").value_or(first_stairs_)),
        decay_step_size_(values.number("decay_step_size")),
        decay_lr_rate_(values.number("decay_lr_rate")),
        decay_momentum_rate_(values.number("decay_mom_rate")),
        min_lrs_(values.per_group("cycle_min_lr", optimizer)),
        max_lrs_(values.per_group("cycle_max_lr", optimizer)) {
    if (!values.flag("cycle_momentum") || !optimizer.has_betas) return;
    min_momenta_ = values.per_group("cycle_min_mom", optimizer);
    max_momenta_ = values.per_group("cycle_max_mom", optimizer);
  }

  Rates operator()(std::int64_t iteration) const {
    const bool in_cycle = as_double(iteration) < total_size_;
    const double h = in_cycle ? height(iteration) : 0.0;
    Rates rates{min_lrs_};
    for (std::size_t g = 0; g < min_lrs_.size(); ++g) {
      if (in_cycle)
        rates.lrs[g] += (max_lrs_[g] - min_lrs_[g]) * h;
      else if (decay_step_size_ != 0.0 && decay_lr_rate_ != 0.0)
        rates.lrs[g] /= 1.0 + decay_lr_rate_ * decays(iteration);
    }
    if (min_momenta_.empty()) return rates;
    rates.betas.emplace();
    for (std::size_t g = 0; g < min_momenta_.size(); ++g) {
      double momentum = max_momenta_[g];
      if (iteration < 0)
        momentum = min_momenta_[g];
      else if (in_cycle)
        momentum -= (max_momenta_[g] - min_momenta_[g]) * h;
      else if (decay_step_size_ != 0.0 && decay_momentum_rate_ != 0.0)
        momentum *= 1.0 + decay_momentum_rate_ * decays(iteration);
      rates.betas->push_back({momentum, kCycledBeta2});
    }
    return rates;
  }

 private:
  // 0 at the lowest, 1 at the highest rate.
  double height(std::int64_t iteration) const {
    const double batch = as_double(iteration + 1);
    const double ratio = first_step_size_ / total_size_;
    const double cycle = std::floor(1.0 + batch / total_size_);
    const double x = 1.0 + batch / total_size_ - cycle;
    const bool rising = x <= ratio;
    const std::int64_t stairs = rising ? first_stairs_ : second_stairs_;
    if (stairs <= 0) return rising ? x / ratio : (x - 1.0) / (ratio - 1.0);
    // Stairs are counted from whole steps: the quotient above may lie a hair below a stair.
    const double step = std::fmod(batch, total_size_);
    const double position = step <= first_step_size_
                                ? step * as_double(stairs) / first_step_size_
                                : (total_size_ - step) * as_double(stairs) / second_step_size_;
    return std::floor(position) / as_double(stairs);
  }

  // Decay steps since the cycle ended.
  double decays(std::int64_t iteration) const {
    return (as_double(iteration) - total_size_ + 1.0) / decay_step_size_;
  }

  double first_step_size_;
  double second_step_size_;
  double total_size_;
  std::int64_t first_stairs_;
  std::int64_t second_stairs_;
  double decay_step_size_;
  double decay_lr_rate_;
  double decay_momentum_rate_;
  std::vector<double> min_lrs_, max_lrs_;
  std::vector<double> min_momenta_, max_momenta_;  // empty: it leaves the momentum alone
};

// Steadily up.
Schedule lr_range_test(const Values& values, const ScheduledOptimizer& optimizer) {
  return [min_lrs = values.per_group("lr_range_test_min_lr", optimizer),
          step_size = as_double(values.integer("lr_range_test_step_size")),
          step_rate = values.number("lr_range_test_step_rate"),
          staircase = values.flag("lr_range_test_staircase")](std::int64_t iteration) -> Rates {
    double intervals = as_double(iteration + 1) / step_size;
    if (staircase) intervals = std::floor(intervals);
    std::vector<double> lrs = min_lrs;
    for (double& lr : lrs) lr *= 1.0 + step_rate * intervals;
    return {lrs};
  };
}

}  // namespace

Schedule make_schedule(const ScheduleParams& params, const ScheduledOptimizer& optimizer) {
  const Values values(params);
  if (params.type == "WarmupCosineLR") return warmup_cosine_lr(values, optimizer);
  if (params.type == "OneCycle") return OneCycle(values, optimizer);
  if (params.type == "LRRangeTest") return lr_range_test(values, optimizer);
  return warmup_lr(values, optimizer);
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
