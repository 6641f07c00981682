#include "strata/engine/schedule/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace strata::engine {
namespace {

using testing::HasSubstr;

// Feeds one step a letter, 'x' for an overflow.
void feed(LossScaler* scaler, std::string_view steps) {
  for (const char step : steps) scaler->update(step == 'x');
}

LossScaleParams small() {
  return {.fixed = 0.0,
          .initial = 16.0,
          .window = 3,
          .hysteresis = 2,
          .consecutive_hysteresis = false,
          .minimum = 1.0};
}

TEST(LossScaler, StaysWhereItIsFixed) {
  LossScaler scaler({.fixed = 128.0});
  feed(&scaler, "x.x.xxxx....");
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_EQ(scaler.scale(), 128.0);
}

TEST(LossScaler, SparesTheFirstOverflowByItsHysteresis) {
  LossScaler scaler(small());
  feed(&scaler, "x");
  EXPECT_EQ(scaler.scale(), 16.0);
  feed(&scaler, "x");
  EXPECT_EQ(scaler.scale(), 8.0);
}

TEST(LossScaler, DoublesAfterAWindowWithoutOverflow) {
  LossScaler scaler(small());
  feed(&scaler, "...");
  EXPECT_EQ(scaler.scale(), 16.0);
  feed(&scaler, ".");  // DeepSpeed counts the very first step from -1, one later than the rest
  EXPECT_EQ(scaler.scale(), 32.0);
}

TEST(LossScaler, RestoresItsHysteresisAtOnceWhenOnlyOverflowsInARowCount) {
  LossScaleParams params = small();
  params.window = 100;
  LossScaler lasting(params);
  params.consecutive_hysteresis = true;
  LossScaler consecutive(params);
  feed(&lasting, "x.x");
  feed(&consecutive, "x.x");
  EXPECT_EQ(lasting.scale(), 8.0);
  EXPECT_EQ(consecutive.scale(), 16.0);
}

TEST(LossScaler, FailsWhenItOverflowsAtItsMinimum) {
  LossScaler scaler(small());
  feed(&scaler, "xxxxx");  // 16, 8, 4, 2, 1
  EXPECT_EQ(scaler.scale(), 1.0);
  try {
    scaler.update(true);
    FAIL() << "no error";
  } catch (const LossScaleError& e) {
    EXPECT_THAT(e.what(), HasSubstr("not finite although the loss scale is at its minimum"));
    EXPECT_THAT(e.what(), HasSubstr("loss scale 1, optimizer step 5"));
  }
}

TEST(LossScaler, ContinuesFromItsState) {
  LossScaler whole(small());
  feed(&whole, "x..x...x..");
  LossScaler first(small());
  feed(&first, "x..x.");
  LossScaler second(small());
  second.set_state(first.state());
  feed(&second, "..x..");
  EXPECT_EQ(second.state(), whole.state());
}

TEST(LossScaler, RefusesADynamicScaleWithoutAWindow) {
  LossScaleParams params = small();
  params.window = 0;
  try {
    LossScaler scaler(params);
    FAIL() << "no error";
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("fp16.loss_scale_window > 0"));
  }
}

}  // namespace
}  // namespace strata::engine
