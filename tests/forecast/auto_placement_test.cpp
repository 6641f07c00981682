// Placement that the engine chooses: it offloads the least used states first, until the rest has
// room.
#include "strata/forecast/auto_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/model_builder.h"
#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::forecast {
namespace {

using memory::Tier;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kWorld = 2;

plan::ModelBuilder model() {
  plan::ModelBuilder b;
  b.linear(0, "embed", 5'000'000, DType::kBFloat16);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 6; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "inner", "Inner"), "wide", 4'000'000, DType::kBFloat16);
  }
  b.linear(0, "head", 5'000'000, DType::kBFloat16);
  return b;
}

engine::Config config_of(int stage, const std::string& folder = "/drive") {
  return engine::Config::parse(fmt::format(
      R"({{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {},
          "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0,
          "reduce_bucket_size": 1,
          "offload_optimizer": {{"nvme_path": "{}", "buffer_count": 1, "buffer_size": 1e6}},
          "offload_param": {{"buffer_count": 1, "buffer_size": 1e6}}}},
          "strata": {{"placement": "auto"}}}})",
      stage, folder));
}

struct Placed {
  std::vector<plan::ParamSpec> params;
  MemoryForecast forecast;

  int count(Tier tier, bool states) const {
    int found = 0;
    for (const plan::ParamSpec& p : params)
      found += (states ? p.place.states : p.place.weights).value_or(Tier::kDevice) == tier ? 1 : 0;
    return found;
  }
};

Placed placed(const engine::Config& config, const Room& room,
              engine::UpdateRule rule = engine::UpdateRule::kAdamW, bool on_gpus = false) {
  const plan::ModelBuilder b = model();
  Placed result{b.params, {}};
  const Trainers trainers = trainers_of(config, rule, {kWorld, on_gpus, 0});
  place_automatically(result.params, b.tree, config, trainers, room);
  const plan::ModelPlan plan =
      plan::plan_units(result.params, b.tree, engine::plan_options_from(config));
  result.forecast = forecast_training(result.params, plan, b.tree, config, trainers);
  return result;
}

template <typename Call>
std::string lack_in(Call call) {
  try {
    call();
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
  return "no error";
}

// The device's bytes with nothing offloaded (most), and with everything offloaded (least).
Bytes most(int stage) {
  return placed(config_of(stage), {}).forecast.total();
}
Bytes least(int stage) {
  const plan::ModelBuilder b = model();
  std::vector<plan::ParamSpec> params = b.params;
  for (plan::ParamSpec& param : params) param.place = {Tier::kHost, Tier::kHost};
  const engine::Config config = config_of(stage);
  const plan::ModelPlan plan = plan::plan_units(params, b.tree, engine::plan_options_from(config));
  const Trainers trainers = trainers_of(config, engine::UpdateRule::kAdamW, {kWorld, false, 0});
  return forecast_training(params, plan, b.tree, config, trainers).total();
}
// Room for the weights and a few states.
Bytes some_room() {
  return least(3) + (most(3) - least(3)) / 4;
}

TEST(AutoPlacement, LeavesAllOnADeviceThatHasRoom) {
  for (const Room& room : {Room{}, Room{std::nullopt, 1_B}, Room{10_GiB, 1_B}}) {
    const Placed all = placed(config_of(3), room);
    EXPECT_EQ(all.count(Tier::kDevice, true), 8);
    EXPECT_EQ(all.count(Tier::kDevice, false), 8);
    EXPECT_EQ(all.forecast.on(memory::Tier::kHost, memory::Kind::kOptimizerState), 0_B);
    EXPECT_EQ(all.forecast.total_on(memory::Tier::kNvme), 0_B);
  }
}

TEST(AutoPlacement, FillsTheDeviceWithWhatIsUsedMostAndStaysWithinItsRoom) {
  int offloaded_states = 0;
  int offloaded_weights = 0;
  bool over = false;
  for (Bytes budget = most(3); !over; budget -= 10_MiB) {
    try {
      const Placed some = placed(config_of(3), {budget, std::nullopt});
      EXPECT_LE(some.forecast.total(), budget);
      EXPECT_EQ(some.forecast.total_on(memory::Tier::kNvme), 0_B) << "the host has no bound";
      if (some.count(Tier::kHost, false) > 0) {
        EXPECT_EQ(some.count(Tier::kHost, true), 8) << "states leave before weights";
      }
      EXPECT_GE(some.count(Tier::kHost, true), offloaded_states);
      EXPECT_GE(some.count(Tier::kHost, false), offloaded_weights);
      offloaded_states = some.count(Tier::kHost, true);
      offloaded_weights = some.count(Tier::kHost, false);
      const auto again = placed(config_of(3), {budget, std::nullopt});
      for (std::size_t i = 0; i < some.params.size(); ++i)
        EXPECT_EQ(some.params[i].place, again.params[i].place);
    } catch (const OutOfMemoryError&) {
      over = true;
    }
  }
  EXPECT_EQ(offloaded_states, 8);
  EXPECT_GT(offloaded_weights, 0);
}

TEST(AutoPlacement, FillsTheHostBeforeTheDrive) {
  const Bytes device = some_room();
  const Bytes host =
      placed(config_of(3), {device, std::nullopt}).forecast.total_on(memory::Tier::kHost);
  const Placed some = placed(config_of(3), {device, host - 50_MiB});
  EXPECT_LE(some.forecast.total(), device);
  EXPECT_LE(some.forecast.total_on(memory::Tier::kHost), host - 50_MiB);
  EXPECT_GT(some.count(Tier::kHost, true), 0);
  EXPECT_GT(some.count(Tier::kNvme, true), 0);
  EXPECT_EQ(some.count(Tier::kNvme, false), 0);
  EXPECT_GT(some.forecast.on(Tier::kNvme, memory::Kind::kOptimizerState), 0_B);
  // Gradients of states that left are on the host.
  const Bytes gradients = some.forecast.on(memory::Tier::kHost, memory::Kind::kGradientShards);
  EXPECT_GT(gradients, 0_B);
  EXPECT_THAT(lack_in([&] {
                placed(config_of(3), {device, gradients});
              }),
              AllOf(HasSubstr("the host does not suffice"), HasSubstr("lower buffer_count"),
                    HasSubstr("staging 51.8 MiB"), HasSubstr("of its device")));
}

// A device that runs ahead stages offloaded states in its memory. The stage takes more bytes than
// offloading one unit's states frees.
TEST(AutoPlacement, TakesNoMoreFromAGpuThanWhatDoesNotFit) {
  const auto gpu = [](const Room& room) {
    return placed(config_of(3), room, engine::UpdateRule::kAdamW, true);
  };
  const Bytes whole = gpu({}).forecast.total();
  const Placed some = gpu({whole - 1_B, std::nullopt});
  EXPECT_LT(some.forecast.total(), whole);
  EXPECT_LT(some.forecast.of(memory::Kind::kStaging), 1_KiB);
  EXPECT_EQ(some.count(Tier::kHost, true), 1);
  EXPECT_GT(some.count(Tier::kDevice, true), 0);
}

TEST(AutoPlacement, SaysWhatDoesNotFitInNumbers) {
  EXPECT_THAT(lack_in([&] {
                placed(config_of(3, ""), {some_room(), 20_MiB});
              }),
              AllOf(HasSubstr("there is no nvme_path"), HasSubstr("it may take 20.0 MiB"),
                    HasSubstr("optimizer state ")));
  EXPECT_THAT(lack_in([&] {
                placed(config_of(3), {1_MiB, 1_GiB});
              }),
              AllOf(HasSubstr("the device does not suffice"), HasSubstr("it may hold 1.00 MiB"),
                    HasSubstr("gathered weights ")));
}

TEST(AutoPlacement, MovesWhatMayBeMoved) {
  const Placed whole = placed(config_of(2), {most(2) - 60_MiB, 1_GiB});
  EXPECT_GT(whole.count(Tier::kHost, true), 0);
  EXPECT_EQ(whole.count(Tier::kDevice, false), 8) << "below stage 3 weights are not sharded";
  EXPECT_THAT(lack_in([&] {
                placed(config_of(0), {most(0) - 60_MiB, 1_GiB});
              }),
              HasSubstr("at stage 0"));
  EXPECT_THAT(lack_in([&] {
                placed(config_of(3), {some_room(), 1_GiB}, engine::UpdateRule::kExternal);
              }),
              HasSubstr("the device does not suffice"));
  const Bytes evaluating = placed(config_of(3), {}, engine::UpdateRule::kNone).forecast.total();
  const Placed frozen =
      placed(config_of(3), {evaluating - 10_MiB, 1_GiB}, engine::UpdateRule::kNone);
  EXPECT_GT(frozen.count(Tier::kHost, false), 0) << "nothing is trained, and weights move";
}

TEST(AutoPlacement, TakesWhatTheConfigurationSaysAndElseAShareOfWhatIsFree) {
  engine::OffloadConfig config;
  Room room = room_for(config, {90_GiB, 100_GiB, false});
  EXPECT_EQ(room.device, 60_GiB);
  EXPECT_EQ(room.host, 75_GiB);
  room = room_for(config, {90_GiB, 100_GiB, true});
  EXPECT_EQ(room.device, std::nullopt) << "CPU ranks have no device of their own";
  config.device_budget = 5_GiB;
  room = room_for(config, {std::nullopt, 100_GiB, true});
  EXPECT_EQ(room.device, 5_GiB);
  EXPECT_EQ(room.host, 70_GiB);
  config.host_budget = 1_GiB;
  EXPECT_EQ(room_for(config, {90_GiB, 100_GiB, false}).host, 1_GiB);
  EXPECT_EQ(free_memory_of({8, true, 4}, 1_GiB, 100_GiB).host, 25_GiB);
}

}  // namespace
}  // namespace strata::forecast
