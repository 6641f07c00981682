// The tests compare every message whole or nearly so: the path, the wanted or meant value, the text
// to write, and the value found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Refusal {
  const char* json;
  const char* message;  // its beginning
};

void expect_refusals(const std::vector<Refusal>& cases) {
  for (const Refusal& c : cases) EXPECT_THAT(refusal_of(c.json), StartsWith(c.message)) << c.json;
}

TEST(Refusals, NameTheTypeThatWasWanted) {
  expect_refusals({
      {R"({"zero_optimization": {"stage": "two"}})",
       "zero_optimization.stage: wanted an integer 0..3 (0: nothing is sharded; 1: optimizer "
       "state; "
       "2: and gradients; 3: and parameters); found \"two\""},
      {R"({"zero_optimization": {"stage": 4}})",
       "zero_optimization.stage: wanted an integer 0..3 (0: nothing is sharded; 1: optimizer "
       "state; "
       "2: and gradients; 3: and parameters); found 4"},
      {R"({"zero_optimization": {"stage": 1.5}})",
       "zero_optimization.stage: wanted an integer 0..3"},
      {R"({"zero_optimization": {"stage3_max_live_parameters": " 5e8"}})",
       "zero_optimization.stage3_max_live_parameters: wanted a number of elements >= 0 (upper "
       "bound on gathered elements, excluding units in use and the next unit (unless "
       "stage3_prefetch_bucket_size is 0); modules outside blocks share a unit only up to it; "
       "null: 1e9, or stage3_prefetch_bucket_size with stage3_allgather_sequential); found \" "
       "5e8\""},
      {R"({"zero_optimization": {"reduce_bucket_size": -0.5}})",
       "zero_optimization.reduce_bucket_size: wanted a number of elements >= 0"},
      {R"({"zero_optimization": {"stage3_max_live_parameters": NaN}})",
       "zero_optimization.stage3_max_live_parameters: wanted a number of elements >= 0 (upper "
       "bound on gathered elements, excluding units in use and the next unit (unless "
       "stage3_prefetch_bucket_size is 0); modules outside blocks share a unit only up to it; "
       "null: 1e9, or stage3_prefetch_bucket_size with stage3_allgather_sequential); found NaN"},
      {R"({"zero_optimization": [3]})",
       "zero_optimization: wanted an object { ... } (the ZeRO stage, its buckets and its offload); "
       "found [3]"},
      {R"({"zero_optimization": {"ignore_unused_parameters": "false"}})",
       "zero_optimization.ignore_unused_parameters: wanted true or false (whether a trainable "
       "parameter may get no gradient in a step); write it without quotes; found \"false\""},
      {R"({"gradient_clipping": Infinity})",
       "gradient_clipping: wanted a number >= 0 (largest global L2 norm of the gradient; 0 does "
       "not "
       "clip); found Infinity"},
      {R"({"gradient_clipping": -1})", "gradient_clipping: wanted a number >= 0"},
      {R"({"steps_per_print": NaN})", "steps_per_print: wanted a number or Infinity, > 0"},
      {R"({"communication_data_type": "fp8"})",
       "communication_data_type: wanted one of fp32, fp16, bf16 (in any case) (element type in "
       "which gradients travel; null: fp32); found \"fp8\""},
      {R"({"strata": {"max_live_bytes": "12 apples"}})",
       "strata.max_live_bytes: wanted bytes as a number or text like \"512MiB\", > 0"},
      {R"({"strata": {"wrap": "Block"}})",
       "strata.wrap: wanted a list of texts (classes of the blocks that become units; []: the "
       "engine finds blocks); write [\"...\"]; found \"Block\""},
      {R"({"strata": {"init": {"tier": "fast"}}})",
       "strata.init.tier: wanted one of auto, device_copy, device_grow, distributed, host (the way "
       "for the values of a model that the script has built; auto: the first way for which every "
       "rank has memory); found \"fast\""},
      {R"({"strata": {"init": {"tier": "born_flat"}}})",
       "strata.init.tier: wanted one of auto, device_copy, device_grow, distributed, host"},
      {R"({"strata": {"init": {"report": true}}})", "strata.init.report: wanted a text"},
      {R"({"train_batch_size": 0})", "train_batch_size: wanted an integer 1..2147483647"},
      {R"({"fp16": {"enabled": true, "loss_scale": -2}})", "fp16.loss_scale: wanted a number >= 0"},
      {R"({"fp16": {"enabled": true, "loss_scale_window": 0}})",
       "a dynamic loss scale (fp16.loss_scale 0) needs fp16.loss_scale_window > 0"},
      {R"({"steps_per_print": "auto"})",
       "steps_per_print: \"auto\" is filled in by the caller of other keys, not of this one"},
  });
}

TEST(Refusals, NameTheNearestKnownKey) {
  expect_refusals({
      {R"({"zero_optimisation": {}})",
       "zero_optimisation: unknown key; the nearest known one is \"zero_optimization\"; write that "
       "or remove the key; found {}"},
      {R"({"zero_optimization": {"stge": 2}})",
       "zero_optimization.stge: unknown key; the nearest known one is \"zero_optimization.stage\""},
      {R"({"zero_optimization": {"leaf_module": {"class": []}}})",
       "zero_optimization.leaf_module.class: unknown key; the nearest known one is "
       "\"zero_optimization.leaf_module.classes\""},
      {R"({"strata": {"max_live": 5}})",
       "strata.max_live: unknown key; the nearest known one is \"strata."},
      {R"({"wandb": {"porject": "x"}})",
       "wandb.porject: unknown key; the nearest known one is \"wandb.project\""},
      {R"({"stage": 3})",
       "stage: unknown key; the nearest known one is \"zero_optimization.stage\""},
  });
}

TEST(Refusals, OfTopLevelKeysSpareOnesThatResembleNone) {
  // Another name of a known section, a part of a known key, or a known key of another section.
  expect_refusals({
      {R"({"zero": {"stage": 3}})",
       "zero: unknown key; the nearest known one is \"zero_optimization\"; write that or remove "
       "the "
       "key; found {\"stage\":3}"},
      {R"({"my_optimizer": {"type": "SGD"}})",
       "my_optimizer: unknown key; the nearest known one is \"optimizer\""},
      {R"({"lr_scheduler": {}})",
       "lr_scheduler: unknown key; the nearest known one is \"scheduler\""},
      {R"({"batch_size": 8})",
       "batch_size: unknown key; the nearest known one is \"train_batch_size\""},
      {R"({"gradient_accumulation": 8})",
       "gradient_accumulation: unknown key; the nearest known one is "
       "\"gradient_accumulation_steps\""},
      {R"({"lr": 0.1})", "lr: unknown key; the nearest known one is \"optimizer.params.lr\""},
      {R"({"total_num_steps": 5})",
       "total_num_steps: unknown key; the nearest known one is "
       "\"scheduler.params.total_num_steps\""},
      {R"({"offload_optimizer": {"device": "cpu"}})",
       "offload_optimizer: unknown key; the nearest known one is "
       "\"zero_optimization.offload_optimizer\""},
      {R"({"use_bf16": true})", "use_bf16: unknown key; the nearest known one is \"bf16\""},
      {R"({"float16": {}})", "float16: unknown key; the nearest known one is \"bf16\""},
      {R"({"zero_optimization": {"mine": {}}})", "zero_optimization.mine: unknown key"},
  });
  const Config c = parsed(R"({"my_project": {"stage": 9, "optimizer": "x"}, "data": {}, "model": {},
      "experiment": null, "comment": "a text", "seed": 7, "project": {"name": "run"},
      "train_batch_size": 8})");
  for (const char* own : {"my_project", "data", "model", "comment", "seed", "project"}) {
    EXPECT_EQ(reason_of(c, own),
              "no key of DeepSpeed or Strata has a name like it, so it is taken for your own")
        << own;
  }
}

TEST(Refusals, SayWhatToWriteInsteadOfAFeature) {
  expect_refusals({
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}})",
       "zero_optimization.offload_optimizer.nvme_path: wanted the path of a folder"},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
       "zero_optimization.offload_param.nvme_path: wanted the path of a folder on the drive that "
       "the weights go to, or a list of such; found none"},
      {R"({"zero_optimization": {"offload_param": {"device": "gpu"}}})",
       "zero_optimization.offload_param.device: wanted one of none, cpu, nvme"},
      {R"({"zero_optimization": {"legacy_stage1": true}})",
       "zero_optimization.legacy_stage1: not supported (the first implementation of stage 1); "
       "write "
       "\"stage\": 1 alone; found true"},
      {R"({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}})",
       "zero_optimization.zenflow: not supported (asynchronous updates of ZenFlow); remove the "
       "section; found {\"topk_ratio\":0.1}"},
      {R"({"zero_optimization": {"stage": 2, "mics_shard_size": 8}})",
       "zero_optimization.mics_shard_size: shard groups are those of stage 3 (DeepSpeed does not "
       "look "
       "at the key below it, and shards over all ranks); write \"stage\": 3, or remove the key; "
       "found 8 at stage 2"},
      {R"({"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 4}})",
       "zero_optimization.zero_hpz_partition_size: shard groups are those of stage 3"},
      {R"({"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 4}})",
       "zero_optimization.mics_shard_size: contradicts zero_optimization.zero_hpz_partition_size"},
      {R"({"zero_optimization": {"stage": 3, "mics_shard_size": -2}})",
       "zero_optimization.mics_shard_size: wanted"},
      {R"({"zero_optimization": {"zero_quantized_gradients": true}})",
       "zero_optimization.zero_quantized_gradients: not supported"},
      {R"({"amp": {"enabled": true, "opt_level": "O1"}})",
       "amp: not supported (mixed precision of NVIDIA apex); remove the section and write "
       "\"bf16\": "
       "{\"enabled\": true}; found "},
      {R"({"compile": {"deepcompile": true}})",
       "compile.deepcompile: not supported (DeepCompile); write false or remove the key, and call "
       "engine.compile(); found true"},
      {R"({"tensor_parallel": {"autotp_size": 4}})", "tensor_parallel: not supported"},
      {R"({"sequence_parallel_size": 2, "strata": {"sequence_parallel": {"size": 4}}})",
       "sequence_parallel_size: contradicts strata.sequence_parallel.size"},
      {R"({"log_level": "loud"})", "log_level: wanted"},
      {R"({"torch_autocast": {"enabled": true}})", "torch_autocast.dtype: wanted"},
      {R"({"torch_autocast": {"enabled": true, "dtype": "bf16"}, "fp16": {"enabled": true}})",
       "torch_autocast.dtype: contradicts fp16.enabled"},
      {R"({"data_types": {"param_dtype": "bf16"}})", "data_types.param_dtype: not supported"},
      {R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})",
       "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads"},
      {R"({"bf16": {"bf16_master_weights_and_grads": true}})",
       "bf16.bf16_master_weights_and_grads: is for bf16 weights"},
  });
}

// One rule for all of them.
TEST(Refusals, SpareFeaturesThatAreOff) {
  for (const char* off :
       {R"({"amp": {"enabled": false, "opt_level": "O1"}, "elasticity": null, "eigenvalue": {}})",
        R"({"amp": 0, "nebula": "auto", "elasticity": {"enabled": "auto"}})",
        R"({"curriculum_learning": {"disable": true, "min": 3}})",
        R"({"tensor_parallel": {"autotp_size": 1}, "pipeline": {"stages": 1, "seed": 7}})",
        R"({"tensor_parallel": {"enabled": true, "autotp_size": 0, "tp": {"tp_size": 1}}})",
        R"({"tensor_parallel": {"tp": {"tp_size": 4, "enabled": false}}})",
        R"({"expert_parallel": {"ep_size": 1, "deep": {"degree": 1, "list": [], "a": null}}})",
        R"({"compile": {"deepcompile": false, "passes": ["autosp"]}})",
        R"({"compile": {"disable": false, "backend": "inductor", "kwargs": {"mode": "x"}}})",
        R"({"sparse_gradients": false, "sequence_parallel_size": 1, "graph_harvesting": 0})",
        R"({"sequence_parallel_size": 0, "data_types": {"param_dtype": ""}})",
        R"({"data_efficiency": {"enabled": true, "data_sampling": {"enabled": false},
               "data_routing": {"enabled": true, "random_ltd": {"enabled": false, "n": 3}}}})",
        R"({"data_efficiency": {"enabled": false, "data_routing": {"random_ltd": {
               "enabled": true}}}})",
        R"({"compression_training": {"weight_quantization": {"shared_parameters": {
               "enabled": false, "bits": 8}, "different_groups": {"a": {"modules": ["x"]}}},
               "layer_reduction": {"enabled": false, "keep_number_layer": 5}}})",
        R"({"zero_optimization": {"zenflow": {}, "mics_shard_size": -1, "legacy_stage1": false,
               "zero_hpz_partition_size": 1, "zero_quantized_weights": false,
               "zeropp_loco_param": {"err_beta": 0.8}, "offload_optimizer": null,
               "offload_param": {"device": "none", "nvme_path": null}}})"}) {
    EXPECT_EQ(refusal_of(off), "accepted") << off;
  }
  for (const char* on :
       {R"({"amp": true})", R"({"amp": {"opt_level": "O1"}})", R"({"amp": {"enabled": true}})",
        R"({"tensor_parallel": {"autotp_size": 2}})", R"({"tensor_parallel": {"enabled": true}})",
        R"({"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 2}}})",
        R"({"pipeline": {"stages": 2}})", R"({"expert_parallel": {"ep_size": 2}})",
        R"({"expert_parallel": {"rank": 1}})", R"({"elasticity": {"enabled": "yes"}})",
        R"({"data_efficiency": {"enabled": true, "data_routing": {"random_ltd": {
            "enabled": true}}}})",
        R"({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": true}}}})",
        R"({"curriculum_learning": {"enabled": true, "disable": false}})"}) {
    EXPECT_THAT(refusal_of(on), HasSubstr(": not supported (")) << on;
  }
  EXPECT_EQ(
      reason_of(parsed(R"({"zero_optimization": {"zenflow": {}}})"), "zero_optimization.zenflow"),
      "an empty section counts as off: asynchronous updates of ZenFlow");
  EXPECT_THAT(reason_of(parsed(R"({"compile": {"backend": "eager"}})"), "compile.backend"),
              HasSubstr("engine.compile("));
  EXPECT_TRUE(parsed(R"({"compile": {"disable": true, "backend": "eager"}})").hints.empty());
}

TEST(Refusals, LeaveOnTheDeviceWhatIsNotShardedAndWarn) {
  const Config two =
      parsed(R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"},
                                "offload_optimizer": {"device": "cpu"}}})");
  EXPECT_EQ(two.offload.param, memory::Tier::kDevice);
  EXPECT_EQ(two.offload.optimizer, memory::Tier::kHost);
  ASSERT_EQ(two.hints.size(), 1U);
  EXPECT_EQ(two.hints[0], (Hint{"zero_optimization.offload_param.device",
                                "weights are sharded at stage 3 alone, and nothing is offloaded at "
                                "stage 2; write \"none\", or that stage",
                                true}));
  const Config none = parsed(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"},
                                 "offload_param": {"device": "nvme"}}})");
  EXPECT_EQ(none.offload.optimizer, memory::Tier::kDevice);
  EXPECT_FALSE(none.offload.offloads_params());
  EXPECT_EQ(none.hints.size(), 2U);
}

TEST(Refusals, NameANullThatWouldBeTakenForANumber) {
  expect_refusals({
      {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": null}}})",
       "scheduler.params.warmup_num_steps: null is no value of it, and trained numbers would "
       "depend "
       "on what it is taken for; write an integer > 0 (steps of the warm-up; fewer than 2 count as "
       "2), or remove the key, which gives 1000; found null"},
      {R"({"gradient_clipping": null})", "gradient_clipping: null is no value of it"},
      {R"({"zero_optimization": {"stage": null}})", "zero_optimization.stage: null is no value"},
      {R"({"optimizer": {"type": "AdamW", "params": {"betas": null}}})",
       "optimizer.params.betas: null is no value of it"},
      {R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": null}}})",
       "optimizer.params.momentum: wanted a number, true or false for torch.optim.SGD; found null"},
      {R"({"fp16": {"enabled": true, "hysteresis": null}})", "fp16.hysteresis: null is no value"},
  });
  EXPECT_EQ(
      refusal_of(R"({"fp16": {"enabled": false, "hysteresis": null}, "bf16": {"enabled": null},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": null}}, "train_batch_size": null,
      "optimizer": {"type": "SGD", "params": {"foreach": null}}})"),
      "accepted");
}

TEST(Refusals, NameShardGroupsThatDoNotComeOutEven) {
  const Config config = parsed(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})");
  EXPECT_EQ(config.shard_group_size(4), 4);
  EXPECT_EQ(config.shard_group_size(12), 4);
  for (const int world : {2, 6}) {
    try {
      static_cast<void>(config.shard_group_size(world));
      FAIL() << "no error";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(fmt::format("found 4 for {} ranks", world)));
      EXPECT_THAT(error.what(), StartsWith("zero_optimization.mics_shard_size: "));
    }
  }
  for (const char* off : {"{}", R"({"zero_optimization": {"mics_shard_size": -1}})",
                          R"({"zero_optimization": {"mics_shard_size": 0}})",
                          R"({"zero_optimization": {"zero_hpz_partition_size": 1}})"})
    EXPECT_EQ(parsed(off).shard_group_size(6), 6);
  const Config secondary =
      parsed(R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}})");
  EXPECT_EQ(secondary.shard_group_size(6), 3);
  EXPECT_TRUE(secondary.zero.secondary_shards);
  EXPECT_FALSE(config.zero.secondary_shards);
}

TEST(Refusals, NameContradictions) {
  EXPECT_THAT(refusal_of(R"({"bf16": {"enabled": true}, "fp16": {"enabled": true}})"),
              StartsWith("bf16.enabled: contradicts fp16.enabled"));
  EXPECT_THAT(refusal_of(R"({"bf16": {}, "bfloat16": {}})"),
              StartsWith("bfloat16: an old spelling of \"bf16\", which is given too"));
  EXPECT_THAT(refusal_of(R"({"zero_optimization": {"cpu_offload": true,
                             "offload_optimizer": {"device": "none"}}})"),
              StartsWith("zero_optimization.cpu_offload: an old spelling of "
                         "\"zero_optimization.offload_optimizer\""));
}

TEST(Refusals, ShortenLongValues) {
  const std::string message =
      refusal_of(R"({"gradient_clipping": ")" + std::string(5000, 'x') + "\"}");
  EXPECT_LT(message.size(), 400U);
  EXPECT_THAT(message, HasSubstr("xxx..."));
}

}  // namespace
}  // namespace strata::engine
