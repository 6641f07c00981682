// Configurations as frameworks pass them on must be accepted whole.
#include <gtest/gtest.h>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

// A configuration as transformers' Trainer leaves it behind, written by json.dumps.
constexpr const char* kTrainer = R"({
  "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000,
    "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.999], "eps": 1e-08,
    "weight_decay": 0.0}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
    "warmup_num_steps": 10, "total_num_steps": 100}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
    "offload_param": {"device": "none", "pin_memory": true}, "overlap_comm": true,
    "contiguous_gradients": true, "sub_group_size": 1000000000.0, "reduce_bucket_size": 4194304,
    "stage3_prefetch_bucket_size": 3774873.6, "stage3_param_persistence_threshold": 20480,
    "stage3_max_live_parameters": 1000000000.0, "stage3_max_reuse_distance": 1000000000.0,
    "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "steps_per_print": Infinity,
  "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "wall_clock_breakdown": false,
  "checkpoint": {"use_node_local_storage": false}, "zero_allow_untested_optimizer": true,
  "communication_data_type": "fp32"
})";

TEST(FrameworkConfig, OfTransformersTrainerIsAccepted) {
  Config c = parsed(kTrainer);
  c.complete_batch(2);
  EXPECT_EQ(c.zero.stage, 3);
  EXPECT_EQ(c.zero.prefetch_bucket_size, Numel(3'774'873));
  EXPECT_TRUE(c.zero.gather_16bit_weights_on_model_save);
  EXPECT_EQ(c.optimizer->adam.lr, 5e-5);
  EXPECT_EQ(c.scheduler->params.type, "WarmupDecayLR");
  EXPECT_FALSE(c.steps_per_print.has_value());
  EXPECT_EQ(c.zero.overlap_comm, true);
}

TEST(FrameworkConfig, OfTransformersTrainerContradictsAnotherWorldSize) {
  Config c = parsed(kTrainer);
  EXPECT_THROW(c.complete_batch(3), ConfigError);
}

TEST(FrameworkConfig, OfAcceleratesPluginIsAccepted) {
  const Config c = parsed(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
      "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2,
      "offload_optimizer": {"device": "none", "nvme_path": null},
      "offload_param": {"device": "none", "nvme_path": null},
      "stage3_gather_16bit_weights_on_model_save": false}, "gradient_clipping": 1.0,
      "steps_per_print": Infinity, "fp16": {"enabled": true, "auto_cast": true},
      "bf16": {"enabled": false}, "zero_optimization.reduce_bucket_size": 1048576.0})");
  EXPECT_EQ(c.precision.param_dtype, DType::kFloat16);
  EXPECT_TRUE(c.precision.cast_inputs);
  EXPECT_NE(reason_of(c, "zero_optimization.reduce_bucket_size"), "no hint");
}

}  // namespace
}  // namespace strata::engine
