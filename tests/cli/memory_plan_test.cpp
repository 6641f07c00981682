// `strata plan`: a model as its files describe it, and the memory that the engine would hold for
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command_run.h"
#include "cli/saved_checkpoint.h"
#include "strata/base/error.h"
#include "strata/cli/named_model.h"
#include "strata/format/safetensors.h"
#include "strata/plan/block_search.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kConfig = R"({
  "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
  "zero_optimization": {"stage": 3}})";

// A decoder of 12 layers, in no order.
std::vector<plan::ParamSpec> decoder(std::int64_t width = 64) {
  std::vector<plan::ParamSpec> tensors{{"model.norm.weight", {width}},
                                       {"model.embed_tokens.weight", {1000, width}}};
  for (int i = 11; i >= 0; --i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    tensors.push_back({layer + "input_layernorm.weight", {width}});
    tensors.push_back({layer + "mlp.up_proj.weight", {4 * width, width}});
    tensors.push_back({layer + "self_attn.q_proj.weight", {width, width}});
  }
  return tensors;
}

// A file with this header, and as many zeroes as it says.
void write_model(const std::string& path, const std::vector<plan::ParamSpec>& tensors,
                 DType dtype = DType::kBFloat16) {
  std::vector<format::TensorSpec> specs;
  for (const plan::ParamSpec& tensor : tensors) specs.push_back({tensor.name, dtype, tensor.shape});
  const auto layout = format::lay_out_safetensors(specs, {});
  write_text(path, layout.head);
  std::filesystem::resize_file(path, layout.file_bytes.size());
}

TEST(NamedModel, FindsBlocksByTheirNumbers) {
  const NamedModel model = with_tree({decoder()});
  std::vector<std::string> blocks;
  for (const int block : plan::find_blocks(model.tree, {}))
    blocks.push_back(model.tree[static_cast<std::size_t>(block)].path);
  ASSERT_EQ(blocks.size(), 12U);
  EXPECT_EQ(blocks[2], "model.layers.2");
  EXPECT_EQ(blocks[11], "model.layers.11");
  EXPECT_EQ(model.params.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(model.params[1].name, "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(model.params.back().name, "model.norm.weight");
}

TEST(NamedModel, KnowsListsAndTables) {
  const NamedModel model = with_tree({decoder(), true});
  for (const plan::ModuleNode& module : model.tree) {
    EXPECT_EQ(module.callable, module.path != "model.layers") << module.path;
    EXPECT_EQ(module.read_in_backward, module.path != "model.embed_tokens") << module.path;
    if (module.parent >= 0) {
      const auto& above = model.tree[static_cast<std::size_t>(module.parent)];
      EXPECT_TRUE(module.path.starts_with(above.path));
    }
  }
  EXPECT_EQ(model.tree.back().path, "lm_head");
  EXPECT_THAT(model.tree.back().params, ElementsAre(0));
}

class Plan : public ::testing::Test {
 protected:
  Plan() {
    write_text(folder_ / "ds.json", kConfig);
    write_model(folder_ / "model.safetensors", decoder());
  }
  CommandRun plan(std::vector<std::string> more = {}, const std::string& world = "2") {
    std::vector<std::string> arguments{
        "plan", "--config", folder_ / "ds.json", "--model", folder_.path(), "--world", world};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }
  TestFolder folder_;
};

TEST_F(Plan, SaysWhatEachStageHolds) {
  const auto json = plan({"--json"}).json();
  ASSERT_EQ(json["stages"].size(), 4U);
  const auto held = [&](int stage, const char* kind) {
    return json["stages"][static_cast<std::size_t>(stage)]["device"][kind].get<std::int64_t>();
  };
  const std::int64_t elements = 64 + 1000 * 64 + 12 * (64 + 256 * 64 + 64 * 64);
  EXPECT_EQ(json["elements"], elements);
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_GE(held(stage, "optimizer state"), elements * 4);  // two fp32 moments of a half
    EXPECT_LT(held(stage, "optimizer state"), elements * 5);
    EXPECT_GT(held(stage, "total"), 0);
  }
  EXPECT_GE(held(2, "weights"), elements * 2);
  EXPECT_LT(held(3, "weights"), elements * 2 * 3 / 4);
  EXPECT_GT(held(3, "gathered weights"), 0);
  EXPECT_GE(json["host"]["staging"], (48_MiB).value);
  EXPECT_LT(json["host"]["total"], (49_MiB).value);
  EXPECT_EQ(json["stages"][3]["host"], json["host"]);
  EXPECT_EQ(json["stages"][3]["nvme"], json["nvme"]);
  EXPECT_THAT(plan().out, AllOf(HasSubstr("optimizer state"), HasSubstr("stage 3"),
                                HasSubstr("Not counted: activations"),
                                HasSubstr("all floating parameters are taken to be trained")));
}

TEST_F(Plan, SaysWhatFits) {
  CommandRun result = plan({"--device-memory", "1GiB"});
  EXPECT_EQ(result.code, kDone);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("fits 1.00 GiB"), HasSubstr("stage 3 of the configuration fits")));
  result = plan({"--device-memory", "1KiB"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, AllOf(HasSubstr("DOES NOT FIT"), HasSubstr("no stage does")));
  const auto json = plan({"--json"}).json();
  const auto least = json["stages"][3]["device"]["total"].get<std::int64_t>();
  const auto more = plan({"--device-memory", std::to_string(least * 3 / 4), "--json"}).json();
  EXPECT_FALSE(more["stages"][3]["fits"]);
  EXPECT_GE(more["fits_from"], 4);
}

TEST_F(Plan, CoversHostAndDrive) {
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
      "offload_param": {"device": "cpu"},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/drive", "buffer_count": 1,
                            "buffer_size": 1e6}}})");
  const auto json = plan({"--json", "--host-memory", "1GiB", "--nvme-space", "1GiB"}).json();
  const std::int64_t elements = 64 + 1000 * 64 + 12 * (64 + 256 * 64 + 64 * 64);
  EXPECT_GE(json["host"]["weights"], elements);  // two bytes of a half
  EXPECT_GE(json["nvme"]["optimizer state"], elements * 4);
  EXPECT_GE(json["nvme"]["total"], elements * 5);
  EXPECT_TRUE(json["host_fits"]);
  EXPECT_TRUE(json["nvme_fits"]);
  EXPECT_EQ(json["ranks_of_host"], 2);
  EXPECT_EQ(json["stages"][2]["host"].value("weights", 0), 0) << "whole below stage 3";
  EXPECT_EQ(json["stages"][3]["host"], json["host"]);
  EXPECT_EQ(json["stages"][3]["nvme"], json["nvme"]);
  const CommandRun text = plan({"--host-memory", "60MiB", "--nvme-space", "1MiB"});
  EXPECT_EQ(text.code, kFoundWrong);
  EXPECT_THAT(text.out, AllOf(HasSubstr("fits host 60.0 MiB"), HasSubstr("fits NVMe 1.00 MiB"),
                              HasSubstr("host: weights"), HasSubstr("NVMe: optimizer state"),
                              HasSubstr("host, together"), HasSubstr("NVMe, together"),
                              HasSubstr("the host DOES NOT: 2 ranks of"),
                              HasSubstr("each are more than its 60.0 MiB"),
                              HasSubstr("the drive DOES NOT: 2 ranks of")));
  for (std::size_t end = 0, begin = 0; (end = text.out.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    const std::string line = text.out.substr(begin, end - begin);
    const bool counts = line.find(" MiB") != std::string::npos;
    if (counts && line.find("DOES NOT") == std::string::npos) {
      EXPECT_LE(line.size(), 80U + folder_.path().size()) << line;
    }
  }
}

TEST_F(Plan, CoversHostAndDriveAtEveryStage) {
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": true}, "zero_optimization": {"stage": 2,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/drive", "buffer_count": 1,
                            "buffer_size": 1e6}}})");
  const auto json = plan({"--json", "--host-memory", "1GiB", "--nvme-space", "1MiB"}).json();
  const std::int64_t elements = 64 + 1000 * 64 + 12 * (64 + 256 * 64 + 64 * 64);
  for (const auto& stage : json["stages"]) {
    if (stage["stage"] == 0) {
      EXPECT_EQ(stage["nvme"]["total"], 0) << "nothing is sharded, so nothing is offloaded";
      continue;
    }
    ASSERT_TRUE(stage["nvme"].contains("optimizer state")) << stage;
    EXPECT_GE(stage["nvme"]["optimizer state"], elements * 4);
    EXPECT_GE(stage["nvme"]["total"], stage["nvme"]["optimizer state"]);
    EXPECT_GT(stage["host"]["staging"], 0);
    EXPECT_GE(stage["host"]["total"], stage["host"]["staging"]);
    EXPECT_EQ(stage["host_fits"], true);
    EXPECT_EQ(stage["nvme_fits"], false);
  }
  EXPECT_EQ(json["stages"][2]["host"], json["host"]);
  EXPECT_EQ(json["stages"][2]["nvme"], json["nvme"]);
  EXPECT_THAT(plan({"--nvme-space", "1MiB"}).out,
              ContainsRegex("fits NVMe 1.00 MiB +yes +no +no +no\n"));
}

TEST_F(Plan, PlacesByItself) {
  write_model(folder_ / "model.safetensors", decoder(1024));
  const auto write = [&](const char* section) {
    write_text(folder_ / "ds.json", fmt::format(R"({{"train_micro_batch_size_per_gpu": 1,
      "bf16": {{"enabled": true}}, "zero_optimization": {{"stage": 3, "reduce_bucket_size": 1,
        "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}},
      "strata": {{"placement": "auto" {}}}}})",
                                                section));
  };
  write("");
  CommandRun result = plan({"--json"});
  EXPECT_THAT(result.json()["remarks"].dump(), HasSubstr("all stays on the device"));
  const auto whole = result.json()["stages"][3]["device"]["total"].get<std::int64_t>();
  const auto budget = whole * 7 / 10;
  const auto json = plan({"--json", "--device-memory", std::to_string(budget * 3 / 2)}).json();
  ASSERT_TRUE(json["stages"][3]["lacking"].is_null()) << json["stages"][3]["lacking"];
  EXPECT_LE(json["stages"][3]["device"]["total"], budget + 3);
  EXPECT_GT(json["host"]["optimizer state"], 0);
  EXPECT_TRUE(json["stages"][3]["fits"]);
  write(R"(, "device_budget": 1000)");
  result = plan({"--host-memory", "1GiB"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("stage 3 of the configuration DOES NOT FIT"),
                    HasSubstr("stage 3: strata.placement \"auto\": the device does not suffice")));
  EXPECT_TRUE(plan({"--json"}).json()["stages"][3]["lacking"].is_string());
}

TEST_F(Plan, StagesThatTheConfigurationRulesOutAreSaid) {
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "mics_shard_size": 1}, "strata": {"wrap": ["Block"]}})");
  const auto json = plan({"--json"}).json();
  EXPECT_TRUE(json["stages"][3]["refused"].is_null());
  EXPECT_THAT(json["remarks"].dump(),
              AllOf(HasSubstr("strata.wrap names classes"), HasSubstr("taken to be AdamW")));
}

TEST_F(Plan, AnOpenBatchIsNoError) {
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2}})");
  const CommandRun result = plan();
  EXPECT_EQ(result.code, kDone) << result.err;
  EXPECT_THAT(result.out, HasSubstr("no gradient accumulation"));
}

TEST_F(Plan, TakesATrainingCheckpointToo) {
  SavedCheckpoint().write(folder_ / "run");
  const CommandRun result = run({"plan", "--config", folder_ / "ds.json", "--model",
                                 folder_ / "run", "--world", "2", "--json"});
  EXPECT_EQ(result.json()["elements"], 67) << result.err;
  EXPECT_THAT(result.json()["remarks"].dump(), HasSubstr("share the weight of 'embed.weight'"));
}

TEST_F(Plan, ComparesPlacements) {
  const auto grid = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"plan", "--model", "qwen2.5-7b", "--world", "8"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const auto json = grid({"--json"}).json();
  EXPECT_EQ(json["elements"], 7'615'616'512);
  EXPECT_TRUE(json["best"].is_null()) << "no memory was named";
  ASSERT_EQ(json["grid"].size(), 12U);
  for (const auto& row : json["grid"]) {
    const bool hosted = row["placement"].get<std::string>().ends_with("host");
    const bool driven = row["placement"].get<std::string>().ends_with("NVMe");
    EXPECT_EQ(row["host"].value("optimizer state", 0LL) > 0, hosted) << row;
    EXPECT_EQ(row["nvme"]["total"] > 0, driven) << row;
    EXPECT_TRUE(row["fits"].is_null());
  }
  // The first that fits what was named, and needs nothing that was not.
  const auto total = [&](std::size_t row) {
    return std::to_string(json["grid"][row]["device"]["total"].get<std::int64_t>());
  };
  EXPECT_EQ(grid({"--json", "--device-memory", total(3)}).json()["best"], 3);
  CommandRun result = grid({"--device-memory", total(6)});
  EXPECT_EQ(result.code, kFoundWrong) << "the host's memory was not named";
  EXPECT_THAT(result.out, AllOf(HasSubstr("no: device"), HasSubstr("nothing fits")));
  const std::vector<std::string> more{
      "--device-memory", total(6), "--host-memory", "1TB", "--write", folder_ / "best.json"};
  result = grid(more);
  EXPECT_EQ(result.code, kDone) << result.err;
  EXPECT_THAT(result.out, HasSubstr("the fastest that fits: stage 3, optimizer on the host"));
  const auto best = nlohmann::json::parse(read_text(folder_ / "best.json"));
  EXPECT_EQ(best["zero_optimization"]["stage"], 3);
  EXPECT_EQ(best["zero_optimization"]["offload_optimizer"]["device"], "cpu");
  // The written configuration holds what was said.
  const auto own = run({"plan", "--model", "Qwen2.5-7B", "--world", "8", "--config",
                        folder_ / "best.json", "--json"})
                       .json();
  EXPECT_EQ(own["stages"][3]["device"], json["grid"][6]["device"]);
  EXPECT_EQ(own["host"], json["grid"][6]["host"]);
  EXPECT_EQ(grid({"--write", folder_ / "other.json"}).code, kUsage);
  EXPECT_EQ(grid({"--device-memory", "80GiB", "--write", folder_ / "none/a.json"}).code,
            kFoundWrong);
}

TEST_F(Plan, TheGridKeepsTheConfiguration) {
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": true}, "strata": {"placement": "auto"},
    "zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": 1000000,
      "offload_param": {"device": "nvme", "nvme_path": "/drive", "buffer_count": 7}}})");
  CommandRun result = plan({"--device-memory", "1KiB", "--host-memory", "1TB", "--nvme-space",
                            "1TB", "--write", folder_ / "best.json", "--grid"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "best.json"));
  const auto least = plan({"--json", "--grid"}).json()["grid"][11]["device"]["total"];
  result = plan({"--device-memory", least.dump(), "--nvme-space", "1TB", "--write",
                 folder_ / "best.json", "--micro-batch", "4", "--nvme-path", "/other"});
  ASSERT_EQ(result.code, kDone) << result.out << result.err;
  const auto best = nlohmann::json::parse(read_text(folder_ / "best.json"));
  const auto& zero = best["zero_optimization"];
  EXPECT_EQ(zero["reduce_bucket_size"], 1'000'000);
  EXPECT_FALSE(zero.contains("cpu_offload"));
  EXPECT_FALSE(best["strata"].contains("placement"));
  EXPECT_EQ(best["train_micro_batch_size_per_gpu"], 4);
  EXPECT_EQ(run({"check", folder_ / "best.json"}).code, kDone);
}

TEST_F(Plan, EstimatesActivations) {
  const auto at = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"plan", "--model", "GPT2", "--world",
                                       "8",    "--seq",   "4096", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments).json();
  };
  const auto one = at({});
  EXPECT_EQ(one["activations"]["tokens"], 4096);
  EXPECT_EQ(one["activations"]["estimate"], true);
  const auto four = at({"--micro-batch", "4", "--checkpointing"});
  EXPECT_EQ(four["activations"]["tokens"], 4 * 4096);
  EXPECT_LT(four["activations"]["of_token"], one["activations"]["of_token"]);
  EXPECT_EQ(four["grid"][0]["device"], one["grid"][0]["device"]) << "the engine's own";
  // They count, and leave a twentieth of the device.
  const auto held = one["grid"][3]["device"]["total"].get<std::int64_t>() +
                    one["activations"]["bytes"].get<std::int64_t>();
  const auto row_at = [&](std::int64_t memory, const std::string& loss) {
    write_text(folder_ / "own.json", R"({"train_micro_batch_size_per_gpu": 1,
      "bf16": {"enabled": true}, "strata": {"loss": ")" +
                                         loss + R"("}})");
    return at({"--device-memory", std::to_string(memory), "--config", folder_ / "own.json",
               "--grid"})["grid"][3];
  };
  EXPECT_TRUE(row_at(held / 19 * 20 + 40, "plain")["fits"]);
  EXPECT_FALSE(row_at(held, "plain")["fits"]);
  EXPECT_TRUE(row_at(held, "auto")["fits"]) << "without logits";
  EXPECT_LT(row_at(held, "auto")["activations"]["bytes"], one["activations"]["bytes"]);
  CommandRun result = plan({"--seq", "4096"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("--seq: activations are estimated for decoders"));
  result = run({"plan", "--model", "GPT2", "--world", "8", "--config", folder_ / "ds.json", "--seq",
                "4096"});
  EXPECT_THAT(result.out, AllOf(HasSubstr("activations, about"), HasSubstr("an estimate")));
}

TEST_F(Plan, SaysTheLongestRows) {
  const auto arguments = [&](std::vector<std::string> more) {
    std::vector<std::string> all{"plan", "--model",        "Qwen3-8B", "--device-memory",
                                 "80GB", "--checkpointing"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto json = run(arguments({"--world", "1", "--host-memory", "512GB", "--json"})).json();
  EXPECT_EQ(json["best"], 4) << "the first with room for any rows";
  EXPECT_EQ(json["grid"][0]["longest"]["seq"], 0);
  EXPECT_EQ(json["grid"][0]["longest"]["first"], "engine");
  EXPECT_EQ(json["longest_row"], 7) << "all on the host, before the drive, which was not named";
  const auto& longest = json["longest"];
  EXPECT_EQ(longest["placement"], "optimizer on the host");
  EXPECT_GT(longest["seq"], 100'000);
  EXPECT_EQ(longest["seq"].get<std::int64_t>() % 1024, 0);
  EXPECT_TRUE(longest["fused"]);
  EXPECT_LE(longest["engine"].get<std::int64_t>() + longest["bytes"].get<std::int64_t>(),
            76'000'000'000);
  EXPECT_TRUE(longest["advice"].is_null()) << "all is spared that can be";
  EXPECT_TRUE(json["activations"].is_null()) << "no --seq";
  // Rows of this length fit, and no longer ones.
  const auto fits = [&](std::int64_t seq) {
    return run(arguments({"--world", "1", "--seq", std::to_string(seq), "--json"}))
        .json()["grid"][4]["fits"];
  };
  EXPECT_EQ(fits(longest["seq"]), true);
  EXPECT_EQ(fits(longest["seq"].get<std::int64_t>() + 1024), false);
  const CommandRun text = run(arguments({"--world", "1", "--host-memory", "512GB"}));
  EXPECT_EQ(text.code, kDone);
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("the longest sequence at stage 1, optimizer on the host: "),
                    HasSubstr("first to run out: memory of the device, for"),
                    HasSubstr("GiB  the engine\n"), HasSubstr("GiB  inputs of checkpoints\n"),
                    HasSubstr("the longest of all: stage 3, all on the host: ")));
  EXPECT_THAT(run(arguments({"--world", "8", "--config", folder_ / "ds.json"})).out,
              AllOf(HasSubstr("longest sequence"), HasSubstr("the longest sequence at stage 3: "),
                    HasSubstr("longer with strata.sequence_parallel.size 8: ")));
  EXPECT_EQ(run(arguments({"--world", "1", "--host-memory", "110GB", "--json"}))
                .json()["longest"]["first"],
            "host");
}

TEST_F(Plan, SaysWhyRowsHaveNoLength) {
  CommandRun result = plan({"--checkpointing", "--device-memory", "1GiB"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("--checkpointing: activations are estimated for decoders"));
  EXPECT_EQ(plan({"--checkpointing"}).code, kDone) << "nothing is asked";
  write_text(folder_ / "ds.json", R"({"train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": true}, "strata": {"sequence_parallel": {"size": 6}}})");
  const auto at = [&](const std::string& world) {
    return run(
        {"plan", "--model", "Qwen3-0.6B", "--world", world, "--config", folder_ / "ds.json"});
  };
  EXPECT_THAT(
      at("12").err,
      HasSubstr(
          "16 attention heads and 8 key heads cannot be dealt to 6 ranks; write one of 1, 2"));
  EXPECT_EQ(at("12").code, kUsage);
  EXPECT_THAT(at("8").err, HasSubstr("strata.sequence_parallel.size: must divide the 8 ranks"));
}

TEST_F(Plan, TrainsAdaptersAlone) {
  const auto json = plan({"--json", "--shapes", "--lora-rank", "4"}).json();
  EXPECT_EQ(json["trained_elements"], 12 * 4 * ((256 + 64) + (64 + 64)));
  const auto& shapes = json["shapes"];
  const std::string up = "base_model.model.model.layers.11.mlp.up_proj.";
  EXPECT_EQ(shapes[up + "lora_A.default.weight"]["shape"], nlohmann::json({4, 64}));
  EXPECT_EQ(shapes[up + "lora_B.default.weight"]["shape"], nlohmann::json({256, 4}));
  EXPECT_EQ(shapes[up + "base_layer.weight"]["trained"], false);
  EXPECT_EQ(shapes["base_model.model.model.embed_tokens.weight"]["trained"], false);
  EXPECT_THAT(json["remarks"].dump(),
              HasSubstr("adapters of the linear layers of blocks are trained"));
  write_model(folder_ / "model.safetensors", {{"weight", {4, 4}}});
  EXPECT_THAT(plan({"--lora-rank", "4"}).err, HasSubstr("no block of the model has a linear"));
}

TEST_F(Plan, FreezesByName) {
  const auto json = plan({"--json", "--frozen", "embed", "--frozen", "layers\\.[0-9]\\."}).json();
  EXPECT_EQ(json["trained_elements"], 64 + 2 * (64 + 256 * 64 + 64 * 64));
  EXPECT_THAT(plan({"--frozen", "("}).err, HasSubstr("no regular expression"));
  EXPECT_THAT(plan({"--frozen", "nothing"}).err, HasSubstr("no parameter has such a name"));
}

TEST_F(Plan, SaysWhatIsWrong) {
  std::filesystem::remove(folder_ / "model.safetensors");
  write_text(folder_ / "config.json", "{}");
  CommandRun result = plan();
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("shapes are known for"), HasSubstr("a folder with safetensors"),
                    HasSubstr("strata.memory_forecast(model, config, world_size)")));
  EXPECT_THAT(run({"plan", "--model", "Qwen9", "--world", "2"}).err,
              AllOf(HasSubstr("no such file or folder"), HasSubstr("Qwen3-8B")));
  write_model(folder_ / "model.safetensors", decoder());
  write_text(folder_ / "ds.json", R"({"zero_optimisation": {"stage": 3}})");
  result = plan();
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("zero_optimization"));
  write_text(folder_ / "ds.json", "{]");
  EXPECT_EQ(plan().code, kUsage);
  write_text(folder_ / "ds.json", R"({"train_batch_size": 3})");
  EXPECT_THAT(plan().err, HasSubstr("train_batch_size"));
  EXPECT_EQ(plan({"--device-memory", "much"}).code, kUsage);
  EXPECT_EQ(plan({}, "0").code, kUsage);
}

}  // namespace
}  // namespace strata::cli
