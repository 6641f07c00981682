// Schedules that begin with a warm-up: WarmupLR, WarmupDecayLR, WarmupCosineLR. See schedule.h.
#pragma once

#include <cstdint>
#include <vector>

#include "strata/engine/schedule/schedule.h"

namespace strata::engine {

// How far the warm-up has come, 0 to 1, by logarithm or line.
class Warmup {
 public:
  Warmup(std::int64_t steps, WarmupShape shape);

  std::int64_t steps() const { return steps_; }
  bool covers(std::int64_t iteration) const { return iteration < steps_; }
  double progress(std::int64_t iteration) const;  // of an iteration >= 0 that it covers

 private:
  std::int64_t steps_;
  WarmupShape shape_;
  double inverse_log_;
};

// From min_lr to max_lr, which then stays.
class WarmupLr : public Schedule {
 public:
  WarmupLr(const WarmupLrParams& params, const ScheduledOptimizer& optimizer);
  std::vector<double> lrs(std::int64_t iteration) const override;

 protected:
  // Share of the way from min_lr to max_lr once the warm-up is over.
  virtual double share_after(std::int64_t iteration) const;
  const Warmup& warmup() const { return warmup_; }

 private:
  Warmup warmup_;
  std::vector<double> min_lrs_;
  std::vector<double> delta_lrs_;
};

// Then in a line back to min_lr, reached at total_steps.
class WarmupDecayLr : public WarmupLr {
 public:
  WarmupDecayLr(const WarmupDecayLrParams& params, const ScheduledOptimizer& optimizer);

 protected:
  double share_after(std::int64_t iteration) const override;

 private:
  std::int64_t total_steps_;
};

// From min_ratio to 1 of each group's own rate, then by a cosine to cos_min_ratio, which then
// stays.
class WarmupCosineLr : public Schedule {
 public:
  WarmupCosineLr(const WarmupCosineLrParams& params, const ScheduledOptimizer& optimizer);
  std::vector<double> lrs(std::int64_t iteration) const override;

 private:
  double ratio(std::int64_t iteration) const;

  WarmupCosineLrParams params_;
  Warmup warmup_;
  std::vector<double> group_lrs_;
};

}  // namespace strata::engine
