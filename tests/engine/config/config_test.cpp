#include "strata/engine/config/config.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "engine/config/parsing.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// The old keys set a budget; the store decides how tensors share it.
TEST(Config, PlacesOptimizerStates) {
  const Config host =
      parsed(R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",
                 "nvme_path": "/local_nvme", "pin_memory": true}}})");
  EXPECT_EQ(host.offload.optimizer, memory::Tier::kHost);
  EXPECT_TRUE(host.offload.optimizer_folders.empty());
  const Config drive =
      parsed(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
                 "nvme_path": "/drive", "buffer_count": 5, "buffer_size": 1e6}}})");
  EXPECT_EQ(drive.offload.optimizer, memory::Tier::kNvme);
  EXPECT_EQ(drive.offload.optimizer_folders, std::vector<std::string>{"/drive"});
  EXPECT_EQ(drive.offload.staging, Bytes(20'000'000));
  const Config tight =
      parsed(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
                 "nvme_path": "/drive", "buffer_count": 1, "buffer_size": 100}}})");
  EXPECT_EQ(tight.offload.staging, Bytes(400)) << "raised where it is taken";
  EXPECT_EQ(parsed(R"({"zero_optimization": {"stage": 1, "cpu_offload": true}})").offload.optimizer,
            memory::Tier::kHost);
  EXPECT_EQ(parsed("{}").offload.optimizer, memory::Tier::kDevice);
}

TEST(Config, HasDeepSpeedsDefaults) {
  const Config c = parsed("{}");
  EXPECT_EQ(c.zero.stage, 0);
  EXPECT_EQ(c.zero.reduce_bucket_size, Numel(500'000'000));
  EXPECT_EQ(c.zero.prefetch_bucket_size, Numel(50'000'000));
  EXPECT_EQ(c.zero.param_persistence_threshold, Numel(0));
  EXPECT_EQ(c.zero.max_live_parameters, Numel(1'000'000'000));
  EXPECT_TRUE(c.zero.ignore_unused_parameters);
  EXPECT_EQ(c.zero.leaf.classes.size(), 3U);
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_EQ(c.gradient_op, GradientOp::kMean);
  EXPECT_EQ(c.precision.param_dtype, std::nullopt) << "each parameter's own";
  EXPECT_EQ(c.precision.grad_accum_dtype, DType::kFloat32);
  EXPECT_FALSE(c.precision.skip_on_overflow);
  EXPECT_FALSE(c.steps_per_print.has_value());
  EXPECT_FALSE(c.optimizer.has_value());
  EXPECT_FALSE(c.scheduler.has_value());
  EXPECT_TRUE(c.hints.empty());
}

TEST(Config, HasDefaultsOfItsOwnSection) {
  const StrataConfig s = parsed("{}").strata;
  EXPECT_EQ(s.reduce_at, ReduceAt::kMicroStep);
  EXPECT_EQ(s.transports.collectives, comm::CollectivesKind::kAuto);
  EXPECT_EQ(s.transports.gather, comm::TransportKind::kAuto);
  EXPECT_EQ(s.transports.reduce, comm::TransportKind::kAuto);
  EXPECT_FALSE(s.max_live || s.unit_size || s.threads);
  EXPECT_TRUE(s.wrap.empty());
  EXPECT_EQ(s.init_tier, plan::InitTier::kAuto);
  EXPECT_EQ(s.init_read, io::ReadWay::kAuto);
  EXPECT_EQ(s.init_report, std::nullopt);
}

TEST(Config, ReadsItsOwnSection) {
  const StrataConfig s = parsed(R"({"strata": {"reduce_at": "boundary", "collectives": "shm",
      "gather": "peer", "reduce": "nccl",
      "max_live_bytes": "512MiB", "wrap": ["Block"], "unit_size": 1e6, "threads": 3,
      "init": {"tier": "device_grow", "read": "direct", "report": "start.json"},
      "timeout_s": 7.5}})")
                             .strata;
  EXPECT_EQ(s.reduce_at, ReduceAt::kBoundary);
  EXPECT_EQ(s.transports.collectives, comm::CollectivesKind::kShm);
  EXPECT_EQ(s.transports.gather, comm::TransportKind::kPeer);
  EXPECT_EQ(s.transports.reduce, comm::TransportKind::kNccl);
  EXPECT_EQ(s.max_live, 512_MiB);
  EXPECT_EQ(s.wrap, std::vector<std::string>{"Block"});
  EXPECT_EQ(s.unit_size, Bytes(1'000'000));
  EXPECT_EQ(s.threads, 3);
  EXPECT_EQ(s.init_tier, plan::InitTier::kDeviceGrow);
  EXPECT_EQ(s.init_read, io::ReadWay::kDirect);
  EXPECT_EQ(s.init_report, "start.json");
  EXPECT_EQ(s.timeout_s, 7.5);
}

TEST(Config, ReadsBytesWithEverySuffix) {
  const auto bytes = [](const std::string& text) {
    return parsed(R"({"strata": {"unit_size": ")" + text + "\"}}").strata.unit_size;
  };
  EXPECT_EQ(bytes("7B"), 7_B);
  EXPECT_EQ(bytes("2KiB"), 2_KiB);
  EXPECT_EQ(bytes("1.5 GiB"), 1536_MiB);
  EXPECT_EQ(bytes("3MB"), Bytes(3'000'000));
  EXPECT_EQ(bytes("auto"), std::nullopt);
}

TEST(ParseSize, TakesUnitsInAnyCaseAndNoneWhereAsked) {
  const auto any_case = [](std::string_view text) { return parse_size(text, SizeText::kAnyCase); };
  EXPECT_EQ(any_case("5gb"), 5e9);
  EXPECT_EQ(any_case(" 1.5 mIb "), 1.5 * 1024 * 1024);
  EXPECT_EQ(any_case("500"), 500.0);
  EXPECT_EQ(parse_size("5GB", SizeText::kExact), 5e9);
  for (const char* text : {"", "GB", "-5GB", "5 parsecs", "inf", "nan", "5GB more"})
    EXPECT_EQ(any_case(text), std::nullopt) << text;
  for (const char* text : {"5gb", "500", " 5GB"})
    EXPECT_EQ(parse_size(text, SizeText::kExact), std::nullopt) << text;
}

TEST(Config, ReadsBf16) {
  const Config c = parsed(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"},
      "communication_data_type": "fp16"})");
  EXPECT_EQ(c.precision.param_dtype, DType::kBFloat16);
  EXPECT_EQ(c.precision.grad_accum_dtype, DType::kBFloat16);
  EXPECT_EQ(c.precision.communication_dtype, DType::kFloat16);
  EXPECT_TRUE(c.precision.skip_on_overflow);
  EXPECT_EQ(c.precision.loss_scale.fixed, 1.0);
  EXPECT_FALSE(parsed(R"({"bf16": {"enabled": true, "check_grad_overflow": false}})")
                   .precision.skip_on_overflow);
}

TEST(Config, ReadsFp16WithItsLossScale) {
  const PrecisionConfig p = parsed(R"({"fp16": {"enabled": true, "auto_cast": true,
      "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4,
      "consecutive_hysteresis": true, "min_loss_scale": 2}})")
                                .precision;
  EXPECT_EQ(p.param_dtype, DType::kFloat16);
  EXPECT_TRUE(p.cast_inputs);
  EXPECT_TRUE(p.skip_on_overflow);
  const LossScaleParams expected{.fixed = 0.0,
                                 .initial = 4096.0,
                                 .window = 500,
                                 .hysteresis = 4,
                                 .consecutive_hysteresis = true,
                                 .minimum = 2.0};
  EXPECT_EQ(p.loss_scale, expected);
}

TEST(Config, IgnoresALossScaleThatCannotMatter) {
  EXPECT_EQ(refusal_of(R"({"fp16": {"enabled": false, "loss_scale_window": 0}})"), "accepted");
  EXPECT_EQ(refusal_of(R"({"fp16": {"enabled": true, "loss_scale": 64, "loss_scale_window": 0}})"),
            "accepted");
}

TEST(Config, CutsFractionsOfElements) {
  const Config c = parsed(R"({"zero_optimization": {"stage": 3.0,
      "stage3_prefetch_bucket_size": 3774873.6, "reduce_bucket_size": 5e8}})");
  EXPECT_EQ(c.zero.stage, 3);
  EXPECT_EQ(c.zero.prefetch_bucket_size, Numel(3'774'873));
  EXPECT_EQ(c.zero.reduce_bucket_size, Numel(500'000'000));
}

TEST(Config, OneParameterAtATimeKeepsNoMoreThanIsFetchedAhead) {
  const ZeroConfig zero =
      parsed(R"({"zero_optimization": {"stage": 3, "stage3_allgather_sequential": true,
                                       "stage3_prefetch_bucket_size": 1000}})")
          .zero;
  EXPECT_TRUE(zero.allgather_sequential);
  EXPECT_EQ(zero.max_live_parameters, Numel(1000));
  EXPECT_EQ(parsed(R"({"zero_optimization": {"stage3_allgather_sequential": true,
                                             "stage3_max_live_parameters": 5000}})")
                .zero.max_live_parameters,
            Numel(5000));
}

TEST(Config, TakesInfinityWhereItMakesSense) {
  EXPECT_FALSE(parsed(R"({"steps_per_print": Infinity})").steps_per_print.has_value());
  EXPECT_EQ(parsed(R"({"steps_per_print": 10})").steps_per_print, 10);
  EXPECT_EQ(parsed(R"({"zero_optimization": {"stage3_max_live_parameters": Infinity}})")
                .zero.max_live_parameters.value,
            std::numeric_limits<std::int64_t>::max());
}

TEST(Config, KeepsWhatItWasGivenWithoutEffect) {
  const Config c = parsed(R"({"zero_optimization": {"sub_group_size": 1e6}})");
  EXPECT_EQ(c.hint_values.at("zero_optimization.sub_group_size"), "1000000");
}

TEST(Config, ReadsNumbersGivenAsText) {
  Config c = parsed(R"({"train_batch_size": "6", "gradient_clipping": "0.01",
      "steps_per_print": "1e1", "strata": {"max_live_bytes": "4096", "move_inputs": "0"},
      "zero_optimization": {"stage": "3", "stage3_max_live_parameters": "5e8",
                            "reduce_bucket_size": "9223372036854775807"},
      "optimizer": {"type": "Adam", "params": {"lr": "1e-5", "betas": ["0.8", 0.9]}},
      "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": ["1e-3"],
                    "cycle_max_lr": "0.1"}}})");
  EXPECT_EQ(c.batch.train_batch_size, 6);
  EXPECT_EQ(c.gradient_clipping, 0.01);
  EXPECT_EQ(c.steps_per_print, 10);
  EXPECT_EQ(c.strata.max_live, Bytes(4096));
  EXPECT_FALSE(c.strata.move_inputs);
  EXPECT_EQ(c.zero.stage, 3);
  EXPECT_EQ(c.zero.max_live_parameters, Numel(500'000'000));
  EXPECT_EQ(c.zero.reduce_bucket_size, Numel(9'223'372'036'854'775'807));
  EXPECT_EQ(c.optimizer->adam.lr, 1e-5);
  EXPECT_EQ(c.optimizer->adam.beta1, 0.8);
  EXPECT_THAT(c.scheduler->params.values, HasSubstr(R"("cycle_max_lr":0.1)"));
  for (const char* text : {"\"\"", "\" 1\"", "\"1 \"", "\"+1\"", "\"0x1\"", "\"1,0\"", "\"1e999\"",
                           "\"NaN\"", "\"Infinity\"", "\"one\"", "[\"1\"]", "true"}) {
    EXPECT_THAT(refusal_of(fmt::format("{{\"gradient_clipping\": {}}}", text)),
                StartsWith("gradient_clipping: wanted a number >= 0"))
        << text;
  }
}

TEST(Config, ReadsOneAndZeroAsTrueAndFalse) {
  const Config c = parsed(R"({"bf16": {"enabled": 1}, "fp16": {"enabled": 0}, "wandb":
      {"enabled": 0, "project": "x"}, "amp": {"enabled": 0}, "dataloader_drop_last": 1.0,
      "zero_optimization": {"overlap_comm": "1", "cpu_offload": 0, "legacy_stage1": 0}})");
  EXPECT_EQ(c.precision.param_dtype, DType::kBFloat16);
  EXPECT_TRUE(c.drop_last);
  EXPECT_EQ(c.zero.overlap_comm, true);
  EXPECT_TRUE(c.hints.empty());
  for (const char* text : {"2", "-1", "0.5", "\"yes\"", "\"true\"", "[1]"}) {
    EXPECT_THAT(refusal_of(fmt::format("{{\"bf16\": {{\"enabled\": {}}}}}", text)),
                StartsWith("bf16.enabled: wanted true or false"))
        << text;
  }
}

TEST(Config, ReadsSomeWordsInAnyCaseOfLetters) {
  const Config c = parsed(R"({"gradient_allreduce_op": "SUM", "communication_data_type": "BF16",
      "checkpoint": {"tag_validation": "FAIL"}})");
  EXPECT_EQ(c.gradient_op, GradientOp::kSum);
  EXPECT_EQ(c.precision.communication_dtype, DType::kBFloat16);
  EXPECT_EQ(c.digest(), parsed(R"({"gradient_allreduce_op": "sum",
                                   "communication_data_type": "bf16"})")
                            .digest());
  EXPECT_THAT(refusal_of(R"({"strata": {"device": "CPU"}})"), StartsWith("strata.device: wanted"));
}

TEST(Config, TakesAioFromWhereDocumentationPutsIt) {
  const Config c = parsed(R"({"zero_optimization": {"stage": 3, "aio": {"block_size": 262144,
                              "thread_count": 2, "queue_depth": 8}}})");
  EXPECT_EQ(c.offload.io.piece, 256_KiB);
  EXPECT_EQ(c.offload.io.depth, 16);
  EXPECT_THAT(refusal_of(R"({"aio": {}, "zero_optimization": {"aio": {}}})"),
              StartsWith("zero_optimization.aio: an old spelling of \"aio\", which is given too"));
  EXPECT_EQ(parsed(R"({"zero_optimization": {"reduce_bucket_size": 0}})").zero.reduce_bucket_size,
            Numel());
}

TEST(Config, TakesWhatOldFilesHold) {
  EXPECT_EQ(parsed(R"({"zero_optimization": true})").zero.stage, 1);
  EXPECT_EQ(parsed(R"({"zero_optimization": false})").zero.stage, 0);
  const Config c = parsed(R"({"bf16": {"enabled": true, "loss_scale": 0, "hysteresis": 2},
                              "fp16": {"enabled": false, "opt_level": "O1"}})");
  EXPECT_FALSE(c.precision.scales_loss());
  EXPECT_THAT(reason_of(c, "bf16.loss_scale"), StartsWith("the loss needs no scale"));
}

TEST(Config, MapsOldSpellings) {
  const Config c = parsed(R"({"bfloat16": {"enabled": true}, "aio": {"thread_count": 4},
      "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true,
                            "max_live_parameters": 7, "cpu_offload": false,
                            "stage3_allgather_single_param": true}})");
  EXPECT_TRUE(c.zero.allgather_sequential);
  EXPECT_EQ(c.precision.param_dtype, DType::kBFloat16);
  EXPECT_TRUE(c.zero.gather_16bit_weights_on_model_save);
  EXPECT_EQ(c.zero.max_live_parameters, Numel(7));
  EXPECT_EQ(c.offload.io.depth, 4 * 32);
}

TEST(Config, ListsHintsWithTheirReason) {
  const Config c =
      parsed(R"({"prescale_gradients": true, "zero_optimization": {"contiguous_gradients": true},
      "zero_optimization.reduce_bucket_size": 1048576.0, "comms_logger": {"enabled": true,
      "prof_all": true}})");
  EXPECT_EQ(reason_of(c, "prescale_gradients"), "the reduction divides in fp32");
  EXPECT_EQ(reason_of(c, "zero_optimization.contiguous_gradients"),
            "gradients always land in their unit's flat buffer");
  EXPECT_EQ(reason_of(c, "zero_optimization.reduce_bucket_size").substr(0, 14), "a key with a d");
  EXPECT_EQ(reason_of(c, "comms_logger.prof_all"), "all are timed together");
  EXPECT_EQ(c.hints.size(), 4U);
}

TEST(Config, ListsEmptySectionsOfFeaturesThatItDoesNotHave) {
  const Config c = parsed(R"({"zero_optimization": {"zenflow": {}}, "hybrid_engine": {},
      "log_level": "WARNING", "sparse_gradients": true})");
  EXPECT_EQ(reason_of(c, "zero_optimization.zenflow"),
            "an empty section counts as off: asynchronous updates of ZenFlow");
  EXPECT_EQ(reason_of(c, "hybrid_engine").substr(0, 31), "an empty section counts as off:");
  EXPECT_EQ(reason_of(c, "sparse_gradients").substr(0, 31), "sparse gradients are made dense");
  EXPECT_EQ(c.hints.size(), 3U);
  EXPECT_EQ(c.shown.at("log_level"), "\"warning\"");
}

TEST(Config, DoesNotListHintsOfWhatIsSwitchedOffOrNotGiven) {
  const Config c = parsed(R"({"wandb": {"enabled": false, "project": "x"}, "log_level": null,
      "flops_profiler": {"recompute_fwd_factor": 1.0}, "comms_logger": {"prof_all": true},
      "zero_optimization": {"reduce_scatter": "auto"}})");
  EXPECT_TRUE(c.hints.empty());
}

}  // namespace
}  // namespace strata::engine
