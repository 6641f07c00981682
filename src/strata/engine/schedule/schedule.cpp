#include "strata/engine/schedule/schedule.h"

#include <fmt/core.h>

#include <cmath>

#include "strata/base/error.h"
#include "strata/engine/schedule/cycle_schedules.h"
#include "strata/engine/schedule/warmup_schedules.h"

namespace strata::engine {

std::vector<double> PerGroup::spread(std::size_t groups, std::string_view path) const {
  if (scalar) return std::vector<double>(groups, values.at(0));
  if (values.size() != groups) {
    throw ConfigError(
        fmt::format("{}: wanted one number for each of the {} parameter groups; found a list of {}",
                    path, groups, values.size()));
  }
  return values;
}

std::optional<std::vector<Betas>> Schedule::betas(std::int64_t) const {
  return std::nullopt;
}

std::unique_ptr<Schedule> make_schedule(const ScheduleParams& params,
                                        const ScheduledOptimizer& optimizer) {
  struct Maker {
    const ScheduledOptimizer& optimizer;

    std::unique_ptr<Schedule> operator()(const WarmupLrParams& p) const {
      return std::make_unique<WarmupLr>(p, optimizer);
    }
    std::unique_ptr<Schedule> operator()(const WarmupDecayLrParams& p) const {
      return std::make_unique<WarmupDecayLr>(p, optimizer);
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
  return std::visit(Maker{optimizer}, params);
}

}  // namespace strata::engine
