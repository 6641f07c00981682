#include "strata/engine/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"

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

TEST(WarmupLr, StartsWithTwoStepsAtTheLowestRateUnderALogarithm) {
  Scheduler scheduler(make_schedule(WarmupLrParams{}, {{1.0}, true}));
  EXPECT_EQ(scheduler.initial()->lrs, std::vector<double>{0.0});
  EXPECT_EQ(scheduler.step().lrs, std::vector<double>{0.0});
  EXPECT_GT(scheduler.step().lrs[0], 0.0);
}

TEST(WarmupLr, EndsAtEachGroupsOwnRateWhenNoneIsGiven) {
  const auto schedule = make_schedule(WarmupLrParams{}, {{0.5, 0.25}, true});
  EXPECT_EQ(schedule(1000).lrs, (std::vector<double>{0.5, 0.25}));
}

TEST(Schedules, RefuseAListThatIsNotOneNumberAGroup) {
  WarmupLrParams params;
  params.max_lr = PerGroup::each({1.0, 2.0, 3.0});
  const auto message = message_of([&] { make_schedule(params, {{0.1, 0.1}, true}); });
  EXPECT_THAT(message, HasSubstr("scheduler.params.warmup_max_lr"));
  EXPECT_THAT(message, HasSubstr("each of the 2 parameter groups; found a list of 3"));
}

TEST(OneCycle, LeavesTheMomentumOfAnOptimizerWithoutBetasAlone) {
  OneCycleParams params;
  params.min_lr = PerGroup::all(0.1);
  params.max_lr = PerGroup::all(0.2);
  EXPECT_FALSE(make_schedule(params, {{0.1}, false})(5).betas.has_value());
  EXPECT_TRUE(make_schedule(params, {{0.1}, true})(5).betas.has_value());
}

TEST(OneCycle, RefusesARiseOfNoSteps) {
  OneCycleParams params;
  params.min_lr = params.max_lr = PerGroup::all(0.1);
  params.first_step_size = 0.0;
  EXPECT_THAT(message_of([&] {
                make_schedule(params, {{0.1}, true});
              }),
              HasSubstr("cycle_first_step_size must be > 0"));
}

TEST(Scheduler, WritesNothingAtConstructionWhenItContinues) {
  const Scheduler scheduler(make_schedule(LrRangeTestParams{}, {{0.1}, true}), 7);
  EXPECT_FALSE(scheduler.initial().has_value());
  EXPECT_EQ(scheduler.last_iteration(), 7);
}

TEST(Scheduler, RefusesAStateBeforeTheStart) {
  Scheduler scheduler(make_schedule(LrRangeTestParams{}, {{0.1}, true}));
  EXPECT_THAT(message_of([&] { scheduler.set_last_iteration(-2); }), HasSubstr("found -2"));
}

}  // namespace
}  // namespace strata::engine
