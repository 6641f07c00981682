#include "strata/plan/init_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"

namespace strata::plan {
namespace {

using ::testing::HasSubstr;

// Two blocks of 1 Mi bf16 elements.
struct Model {
  std::vector<ParamSpec> params{{"a", {1 << 20}, DType::kBFloat16, true, 0},
                                {"b", {1 << 20}, DType::kBFloat16, true, 0}};
  ModelPlan plan{{{"first", {0}, DType::kBFloat16, true, false},
                  {"second", {1}, DType::kBFloat16, true, false}},
                 {},
                 {0, 1}};
};

InitDemand demand_of(Bytes total) {
  InitDemand demand;
  demand.weights = total;
  demand.largest_unit = 1_GiB;
  return demand;
}

InitFacts on_device(Bytes free, Bytes values) {
  InitFacts facts;
  facts.device_free = free;
  facts.host_free = 1000_GiB;
  facts.device_values = values;
  return facts;
}

InitTier choose(const InitDemand& demand, const std::vector<InitFacts>& facts) {
  return choose_init(demand, facts, InitTier::kAuto, {}).tier;
}

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(InitPlan, CountsWhatARankWillHoldByStage) {
  const Model model;
  const InitDemand sharded =
      init_demand(model.params, model.plan, 3, 2, {UpdateRule::kAdamW, Masters::kFloat32});
  EXPECT_EQ(sharded.weights, 2_MiB);
  EXPECT_EQ(sharded.masters, 4_MiB);
  EXPECT_EQ(sharded.optimizer, 8_MiB);
  EXPECT_EQ(sharded.largest_unit, 2_MiB);
  const InitDemand whole =
      init_demand(model.params, model.plan, 2, 2, {UpdateRule::kAdamW, Masters::kFloat32});
  EXPECT_EQ(whole.weights, 4_MiB);
  EXPECT_EQ(whole.masters, 4_MiB);
  const InitDemand with_remainders =
      init_demand(model.params, model.plan, 3, 2, {UpdateRule::kAdamW, Masters::kRemainder});
  EXPECT_EQ(with_remainders.masters, 2_MiB + 128_KiB);
  EXPECT_EQ(with_remainders.optimizer, 8_MiB);
  const InitDemand rounded = init_demand(model.params, model.plan, 3, 2,
                                         {UpdateRule::kAdamW, Masters::kRounded, DType::kBFloat16});
  EXPECT_EQ(rounded.masters, 0_B);
  EXPECT_EQ(rounded.optimizer, 4_MiB);
}

TEST(InitPlan, AModelWithoutValuesIsBornFlat) {
  EXPECT_EQ(choose(demand_of(10_GiB), {on_device(20_GiB, 0_B)}), InitTier::kBornFlat);
}

TEST(InitPlan, TakesTheCheapestWayThatFits) {
  const InitDemand demand = demand_of(30_GiB);
  EXPECT_EQ(choose(demand, {on_device(40_GiB, 20_GiB)}), InitTier::kDeviceCopy);
  EXPECT_EQ(choose(demand, {on_device(20_GiB, 20_GiB)}), InitTier::kDeviceGrow);
  EXPECT_EQ(choose(demand, {on_device(11_GiB, 20_GiB)}), InitTier::kDistributed)
      << "no room for a unit beside the rest";
}

TEST(InitPlan, ADriverThatCannotMapPagesIsPassedOver) {
  InitFacts facts = on_device(20_GiB, 20_GiB);
  facts.can_grow = false;
  EXPECT_EQ(choose(demand_of(30_GiB), {facts}), InitTier::kDistributed);
}

TEST(InitPlan, AModelOnTheHostIsMovedInParts) {
  InitFacts facts = on_device(40_GiB, 0_B);
  facts.host_free = 1_GiB;
  facts.host_values = 20_GiB;
  EXPECT_EQ(choose(demand_of(30_GiB), {facts, facts}), InitTier::kDistributed);
}

TEST(InitPlan, TheRankWithTheLeastRoomDecidesForAll) {
  const InitFacts rich = on_device(40_GiB, 20_GiB);
  const InitFacts poor = on_device(20_GiB, 20_GiB);
  const InitChoice choice =
      choose_init(demand_of(30_GiB), std::vector{rich, poor}, InitTier::kAuto, {});
  EXPECT_EQ(choice.tier, InitTier::kDeviceGrow);
  EXPECT_THAT(choice.reason, HasSubstr("device_copy lacks"));
  EXPECT_THAT(choice.reason, HasSubstr("on rank 1"));
  EXPECT_THAT(choice.reason, HasSubstr("least is free on rank 1: 20.0 GiB"));
}

TEST(InitPlan, SaysWhoLacksHowMuchAndWhatWouldFit) {
  const std::vector<InitFacts> facts{on_device(20_GiB, 5_GiB), on_device(9_GiB, 5_GiB)};
  const std::string message = message_of([&] {
    choose_init(demand_of(30_GiB), facts, InitTier::kAuto,
                std::vector<InitAlternative>{{"stage 3", 10_GiB}, {"stage 2", 29_GiB}});
  });
  EXPECT_THAT(message, HasSubstr("rank 1 lacks 16.1 GiB of device memory"));
  EXPECT_THAT(message, HasSubstr("Nothing has been moved"));
  EXPECT_THAT(message, HasSubstr("These would fit: stage 3 (10.0 GiB)."));
}

TEST(InitPlan, AWayThatWasAskedForIsTakenOrRefused) {
  const std::vector<InitFacts> facts{on_device(40_GiB, 20_GiB)};
  const InitDemand demand = demand_of(30_GiB);
  EXPECT_EQ(choose_init(demand, facts, InitTier::kHost, {}).tier, InitTier::kHost);
  EXPECT_EQ(choose_init(demand, facts, InitTier::kDeviceGrow, {}).tier, InitTier::kDeviceGrow);
  const std::string message = message_of([&] {
    choose_init(demand, std::vector{on_device(20_GiB, 20_GiB)}, InitTier::kDeviceCopy, {});
  });
  EXPECT_THAT(message, HasSubstr("strata.init.tier: 'device_copy' cannot be taken, rank 0 lacks"));
}

TEST(InitPlan, TiersHaveNames) {
  EXPECT_EQ(name_of(InitTier::kDeviceGrow), "device_grow");
  EXPECT_EQ(name_of(InitTier::kDistributed), "distributed");
  EXPECT_EQ(name_of(InitTier::kBornFlat), "born_flat");
}

}  // namespace
}  // namespace strata::plan
