#include "strata/engine/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

Schedule schedule_of(const std::string& type, const std::string& params,
                     const ScheduledOptimizer& optimizer) {
  const Config config =
      Config::parse(R"({"scheduler": {"type": ")" + type + R"(", "params": )" + params + "}}");
  return make_schedule(config.scheduler->params, optimizer);
}

TEST(WarmupLr, StartsWithTwoStepsAtTheLowestRateUnderALogarithm) {
  Scheduler scheduler(schedule_of("WarmupLR", "{}", {{1.0}, true}));
  EXPECT_EQ(scheduler.initial()->lrs, std::vector<double>{0.0});
  EXPECT_EQ(scheduler.step().lrs, std::vector<double>{0.0});
  EXPECT_GT(scheduler.step().lrs[0], 0.0);
}

TEST(WarmupLr, EndsAtEachGroupsOwnRateWhenNoneIsGiven) {
  const auto schedule = schedule_of("WarmupLR", "{}", {{0.5, 0.25}, true});
  EXPECT_EQ(schedule(1000).lrs, (std::vector<double>{0.5, 0.25}));
}

TEST(Schedules, RefuseAListThatIsNotOneNumberAGroup) {
  const auto message = message_of([&] {
    schedule_of("WarmupLR", R"({"warmup_max_lr": [1.0, 2.0, 3.0]})", {{0.1, 0.1}, true});
  });
  EXPECT_THAT(message, HasSubstr("scheduler.params.warmup_max_lr"));
  EXPECT_THAT(message, HasSubstr("each of the 2 parameter groups; found a list of 3"));
}

TEST(OneCycle, LeavesTheMomentumOfAnOptimizerWithoutBetasAlone) {
  const auto betas_with = [](bool has_betas) {
    return schedule_of("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})",
                       {{0.1}, has_betas})(5)
        .betas;
  };
  EXPECT_FALSE(betas_with(false).has_value());
  EXPECT_TRUE(betas_with(true).has_value());
}

TEST(OneCycle, RefusesARiseOfNoSteps) {
  EXPECT_THAT(message_of([&] {
                schedule_of("OneCycle",
                            R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.1,
                                "cycle_first_step_size": 0.0})",
                            {{0.1}, true});
              }),
              HasSubstr("cycle_first_step_size: wanted a number > 0"));
}

TEST(Scheduler, WritesNothingAtConstructionWhenItContinues) {
  const Scheduler scheduler(schedule_of("LRRangeTest", "{}", {{0.1}, true}), 7);
  EXPECT_FALSE(scheduler.initial().has_value());
  EXPECT_EQ(scheduler.last_iteration(), 7);
}

TEST(Scheduler, RefusesAStateBeforeTheStart) {
  Scheduler scheduler(schedule_of("LRRangeTest", "{}", {{0.1}, true}));
  EXPECT_THAT(message_of([&] { scheduler.set_last_iteration(-2); }), HasSubstr("found -2"));
}

}  // namespace
}  // namespace strata::engine
