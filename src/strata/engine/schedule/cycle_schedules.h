// Schedules that explore rates: OneCycle (up, down, then decay; Smith 2018) and LRRangeTest
// (steadily up). See schedule.h.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "strata/engine/schedule/schedule.h"

namespace strata::engine {

class OneCycle : public Schedule {
 public:
  OneCycle(const OneCycleParams& params, const ScheduledOptimizer& optimizer);
  std::vector<double> lrs(std::int64_t iteration) const override;
  std::optional<std::vector<Betas>> betas(std::int64_t iteration) const override;

 private:
  bool in_cycle(std::int64_t iteration) const;
  double height(std::int64_t iteration) const;  // 0 at the lowest, 1 at the highest rate
  double decays(std::int64_t iteration) const;  // decay steps since the cycle ended

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

class LrRangeTest : public Schedule {
 public:
  LrRangeTest(const LrRangeTestParams& params, const ScheduledOptimizer& optimizer);
  std::vector<double> lrs(std::int64_t iteration) const override;

 private:
  LrRangeTestParams params_;
  std::vector<double> min_lrs_;
};

}  // namespace strata::engine
