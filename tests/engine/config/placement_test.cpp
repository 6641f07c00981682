// Rules that place single parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/parsing.h"
#include "strata/base/error.h"
#include "strata/engine/config/offload_config.h"

namespace strata::engine {
namespace {

std::vector<plan::ParamSpec> placed(const char* json) {
  std::vector<plan::ParamSpec> params;
  for (const auto& [name, elements] :
       {std::pair("embed.weight", 1000), {"layers.0.weight", 100}, {"layers.1.weight", 300}}) {
    plan::ParamSpec param;
    param.name = name;
    param.shape = {elements};
    params.push_back(param);
  }
  params.push_back(params.back());
  params.back().name = "frozen";
  params.back().trainable = false;
  place_params(params, parsed(json).offload);
  return params;
}

TEST(Placement, PlacesParametersByTheFirstRuleThatNamesAPlace) {
  const auto params = placed(R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"nvme_path": "/drive"}}, "strata": {"placement": [
        {"match": "*embed*", "param": "host"}, {"match": "layers.0.*", "optimizer": "host"},
        {"larger_than": 1000, "param": "device", "optimizer": "nvme"}]}})");
  using memory::Tier;
  EXPECT_EQ(params[0].place, (plan::Placement{Tier::kHost, Tier::kNvme}));
  EXPECT_EQ(params[1].place, (plan::Placement{std::nullopt, Tier::kHost}));
  EXPECT_EQ(params[2].place, (plan::Placement{Tier::kDevice, Tier::kNvme}));
  EXPECT_EQ(params[3].place, (plan::Placement{Tier::kDevice, std::nullopt}));
}

TEST(Placement, KeepsAShareOfTheStatesOnTheDevice) {
  const auto params = placed(R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "cpu", "ratio": 0.25}}})");
  EXPECT_EQ(params[0].place.states, memory::Tier::kDevice);
  EXPECT_EQ(params[1].place.states, memory::Tier::kDevice);
  EXPECT_EQ(params[2].place.states, std::nullopt);  // where offload_optimizer says
}

TEST(Offload, DrivesAreReadAndWrittenAsTheAioSectionSays) {
  const OffloadConfig offload = parsed(R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "nvme", "nvme_path": ["/fast", "/slow"]},
      "offload_param": {"device": "nvme", "nvme_path": "/fast", "buffer_count": 2,
                        "buffer_size": 1000, "max_in_cpu": 500}},
      "strata": {"verify_drives": true},
      "aio": {"block_size": 262145, "queue_depth": 16, "thread_count": 4}})")
                                    .offload;
  EXPECT_THAT(offload.optimizer_folders, ::testing::ElementsAre("/fast", "/slow"));
  EXPECT_THAT(offload.param_folders, ::testing::ElementsAre("/fast"));
  EXPECT_EQ(offload.param_staging, Numel(2500));
  EXPECT_EQ(offload.io.piece, 260_KiB);
  EXPECT_EQ(offload.io.depth, 64);
  EXPECT_EQ(offload.io.threads, 64);
  EXPECT_TRUE(offload.verify);
}

TEST(Offload, SettingsThatNoDriveCouldServeAreBounded) {
  const OffloadConfig offload =
      parsed(R"({"aio": {"block_size": "64GiB", "queue_depth": 1e9, "intra_op_parallelism": 1e9}})")
          .offload;
  EXPECT_EQ(offload.io.piece, 1_GiB);
  EXPECT_EQ(offload.io.depth, 4096);
  EXPECT_EQ(offload.io.threads, 64);
  EXPECT_FALSE(offload.verify);
}

TEST(Placement, SaysWhatEachRuleHasPlaced) {
  const char* const json = R"({"zero_optimization": {"stage": 3}, "strata": {"placement": [
      {"match": "layers.0.*", "optimizer": "host"}, {"larger_than": 1000, "optimizer": "host"},
      {"match": "nothing*", "param": "host"}, {"match": "*", "optimizer": "device"}]}})";
  const std::vector<RuleUse> uses = rule_uses(placed(json), parsed(json).offload);
  ASSERT_EQ(uses.size(), 4U);
  EXPECT_EQ(uses[0].rule, "layers.0.*: states on host");
  EXPECT_EQ(uses[0].params, 1);
  EXPECT_EQ(uses[0].bytes, 400_B);
  EXPECT_EQ(uses[1].rule, "* over 1000 B: states on host");
  EXPECT_EQ(uses[1].bytes, 5200_B) << "what is frozen has no states";
  EXPECT_EQ(uses[2].params, 0);
  EXPECT_EQ(uses[3].params, 0) << "others came first";
}

TEST(Placement, MayBeLeftToTheEngine) {
  const Config chosen = parsed(R"({"zero_optimization": {"stage": 3,
      "offload_param": {"device": "cpu", "nvme_path": "/drive", "buffer_count": 2},
      "offload_optimizer": {"ratio": 0.5}},
      "strata": {"placement": "auto", "device_budget": "2GiB"}})");
  const OffloadConfig& offload = chosen.offload;
  EXPECT_TRUE(offload.automatic && offload.places_weights && offload.rules.empty());
  EXPECT_EQ(offload.param, memory::Tier::kDevice);
  EXPECT_THAT(offload.optimizer_folders, ::testing::ElementsAre("/drive"));
  EXPECT_EQ(offload.device_budget, 2_GiB);
  EXPECT_EQ(offload.host_budget, std::nullopt);
  ASSERT_EQ(chosen.hints.size(), 2U);
  EXPECT_EQ(chosen.hints[0].path, "zero_optimization.offload_param.device");
  EXPECT_EQ(chosen.hints[1].path, "zero_optimization.offload_optimizer.ratio");
  for (
      const char* const stays :
      {R"({"zero_optimization": {"stage": 2}, "strata": {"placement": "auto"}})",
       R"({"zero_optimization": {"stage": 3, "mics_shard_size": 2},
            "strata": {"placement": "auto"}})",
       R"({"zero_optimization": {"stage": 3}, "strata": {"placement": "auto", "gather": "peer"}})"})
    EXPECT_FALSE(parsed(stays).offload.offloads_params()) << stays;
  const Config without = parsed(R"({"strata": {"host_budget": 1e9}})");
  ASSERT_EQ(without.hints.size(), 1U);
  EXPECT_EQ(without.hints[0].path, "strata.host_budget");
}

TEST(Placement, SaysWhatIsWrongWithARule) {
  struct Refused {
    const char* json;
    const char* starts;
  };
  const Refused cases[] = {
      {R"({"strata": {"placement": [{"match": "*embed*"}]}})",
       "strata.placement[0]: wanted param or optimizer, which say where it is placed; found"},
      {R"({"strata": {"placement": [{"param": "host"}]}})",
       "strata.placement[0]: wanted match or larger_than, which say what is placed; found"},
      {R"({"strata": {"placement": [{"match": "*", "param": "disk"}]}})",
       "strata.placement[0].param: wanted one of device, host, nvme; found \"disk\""},
      {R"({"strata": {"placement": [{"larger_than": "much", "param": "host"}]}})",
       "strata.placement[0].larger_than: wanted bytes as a number or text like \"200MB\"; found"},
      {R"({"strata": {"placement": [{"match": "*", "params": "host"}]}})",
       "strata.placement[0]: wanted the keys match, larger_than, param, optimizer; found"},
      {R"({"strata": {"placement": {"match": "*"}}})",
       "strata.placement: wanted a list of objects"},
      {R"({"strata": {"placement": "automatic"}})",
       "strata.placement: wanted a list of objects [{ ... }], or \"auto\""},
      {R"({"zero_optimization": {"stage": 3},
          "strata": {"placement": [{"match": "*", "optimizer": "nvme"}]}})",
       "zero_optimization.offload_optimizer.nvme_path: wanted the path of a folder"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme",
          "nvme_path": ["/drive", ""]}}})",
       "zero_optimization.offload_optimizer.nvme_path: wanted the path of a folder on the drive "
       "that the states go to, or a list of such; found an empty one"},
      {R"({"zero_optimization": {"offload_optimizer": {"nvme_path": 3}}})",
       "zero_optimization.offload_optimizer.nvme_path: wanted a text or a list of texts"},
  };
  for (const Refused& c : cases) {
    try {
      parsed(c.json);
      ADD_FAILURE() << "accepted: " << c.json;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith(c.starts));
    }
  }
}

}  // namespace
}  // namespace strata::engine
