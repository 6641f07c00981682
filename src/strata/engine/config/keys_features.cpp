// Rows of checkpoints and diagnostics, and of DeepSpeed's features that Strata does not have: those
// are accepted while they are off.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

constexpr std::string_view kRemove = "remove the section";
constexpr std::string_view kByCall =
    "nothing is compiled until the script calls engine.compile(backend=...)";
constexpr std::string_view kOfDeepCompile = "it is for DeepCompile, which is not offered";

constexpr std::array kFeaturesKeys{
    Key{"amp", kSwitch, "null", "enabled", kRefused, "mixed precision of NVIDIA apex",
        "remove the section and write \"bf16\": {\"enabled\": true}"},
    Key{"compile", kSection, "{}", "", kHint, "compilation of the model", kByCall},
    Key{"compile.deepcompile", kFlag, "false", "", kRefused, "DeepCompile",
        "write false or remove the key, and call engine.compile()"},
    Key{"compile.enabled", kFlag, "true", "", kHint, "whether the model may be compiled", kByCall},
    Key{"compile.disable", kFlag, "false", "", kHint, "or may not", kByCall},
    Key{"compile.backend", kText, "\"inductor\"", "", kHint, "which compiler", kByCall},
    Key{"compile.kwargs", kParams, "{}", "", kHint, "its arguments", kByCall},
    Key{"compile.autoep_non_moe", kFlag, "false", "", kHint, "the modules that are not experts",
        kOfDeepCompile},
    Key{"compile.passes", kStrings, "null", "", kHint, "which passes", kOfDeepCompile},
    Key{"compile.free_activation", kFlag, "false", "", kHint, "free activations early",
        kOfDeepCompile},
    Key{"compile.free_activation_threshold", kBytes, "10485760", ">= 0", kHint, "from which size",
        kOfDeepCompile},
    Key{"compile.offload_activation", kFlag, "false", "", kHint, "activations to the host",
        kOfDeepCompile},
    Key{"compile.offload_activation_pin_memory", kFlag, "true", "", kHint, "to pinned memory",
        kOfDeepCompile},
    Key{"compile.offload_opt_states", kFlag, "false", "", kHint, "states to the host",
        kOfDeepCompile},
    Key{"compile.offload_parameters", kFlag, "false", "", kHint, "weights to the host",
        kOfDeepCompile},
    Key{"compile.double_buffer", kFlag, "true", "", kHint, "two buffers", kOfDeepCompile},
    Key{"compile.symmetric_memory", kFlag, "false", "", kHint, "memory that peers map",
        kOfDeepCompile},
    Key{"compile.debug_log", kFlag, "false", "", kHint, "print graphs", kOfDeepCompile},
    Key{"compile.sync_before_reduce", kFlag, "false", "", kHint, "wait there", kOfDeepCompile},
    Key{"compile.sync_after_reduce", kFlag, "false", "", kHint, "wait there", kOfDeepCompile},
    Key{"compile.sync_before_allgather", kFlag, "false", "", kHint, "wait there", kOfDeepCompile},
    Key{"compile.sync_after_allgather", kFlag, "false", "", kHint, "wait there", kOfDeepCompile},
    Key{"compile.keep_int_input_tensors", kFlag, "true", "", kHint, "inputs that are kept",
        kOfDeepCompile},
    Key{"compile.keep_all_input_tensors", kFlag, "false", "", kHint, "inputs that are kept",
        kOfDeepCompile},
    Key{"elasticity", kSwitch, "null", "enabled", kRefused,
        "batch sizes that follow the world size", "remove the section and set train_batch_size"},
    Key{"tensor_parallel", kSwitch, "null",
        "enabled|autotp_size|tp_size|tp.tp_size|tensor_parallel.tp_size", kRefused,
        "tensor parallelism", kRemove},
    Key{"expert_parallel", kSwitch, "null", "enabled", kRefused, "expert parallelism", kRemove},
    Key{"pipeline", kSwitch, "null", "enabled|stages|pipeline_parallel_size", kRefused,
        "pipeline parallelism", kRemove},
    Key{"sequence_parallel_size", kInteger, "1", ">= 1", kRefused, "sequence parallelism",
        "write 1 or remove the key"},
    Key{"data_parallel_size", kInteger, "null", ">= 1", kRefused,
        "a data-parallel size apart from the world size",
        "remove the key: every rank is a data-parallel rank"},
    Key{"use_data_before_expert_parallelism", kFlag, "false", "", kRefused,
        "order of expert-parallel ranks", "write false or remove the key"},
    Key{"curriculum_learning", kSwitch, "null", "enabled", kRefused, "curriculum learning",
        kRemove},
    Key{"data_efficiency", kSwitch, "null",
        "data_sampling.curriculum_learning|data_sampling.dynamic_batching|data_routing.random_ltd",
        kRefused, "data sampling and routing", kRemove},
    Key{"progressive_layer_drop", kSwitch, "null", "enabled", kRefused, "dropping of layers",
        kRemove},
    Key{"eigenvalue", kSwitch, "null", "enabled", kRefused, "eigenvalues of blocks", kRemove},
    Key{"compression_training", kSwitch, "null",
        "layer_reduction|weight_quantization.shared_parameters|activation_quantization.shared_"
        "parameters|sparse_pruning.shared_parameters|row_pruning.shared_parameters|head_pruning."
        "shared_parameters|channel_pruning.shared_parameters",
        kRefused, "compression while training", kRemove},
    Key{"quantize_training", kSwitch, "null", "enabled", kRefused, "quantisation while training",
        kRemove},
    Key{"weight_quantization", kSwitch, "null", "enabled", kRefused, "quantised weights", kRemove},
    Key{"hybrid_engine", kSwitch, "null", "enabled", kRefused,
        "one engine for training and generation", kRemove},
    Key{"nebula", kSwitch, "null", "enabled", kRefused, "Nebula checkpoints", kRemove},
    Key{"datastates", kSwitch, "null", "enabled", kRefused, "DataStates checkpoints", kRemove},
    Key{"autotuning", kSwitch, "null", "enabled", kRefused, "search for settings",
        "remove the section: the engine sizes its own buffers"},
    Key{"graph_harvesting", kFlag, "false", "", kRefused, "CUDA graphs of the step",
        "write false or remove the key"},
    Key{"sparse_attention", kSwitch, "null", "enabled", kRefused, "block-sparse attention",
        "remove the section: attention is the model's own"},
};

constexpr std::string_view kOwnWriter =
    "shards are written through a ring of buffers, all ranks at once";
constexpr std::string_view kOwnCheckpointing =
    "activation checkpointing is torch.utils.checkpoint's or the model's own";

constexpr std::array kDiagnosticsKeys{
    Key{"checkpoint", kSection, "{}", "", kHonoured, "checkpoints of training"},
    Key{"checkpoint.async", kFlag, "false", "", kHonoured,
        "save_checkpoint copies the shards to the host and returns; a thread writes them during "
        "the next steps"},
    Key{"checkpoint.keep", kInteger, "0", ">= 0", kHonoured,
        "number of checkpoints that stay in a folder; a new one removes the oldest; 0: all"},
    Key{"checkpoint.tag_validation", kWord, "\"Warn\"", "Warn|Ignore|Fail", kHint,
        "what to do when ranks name different tags", "it is always an error, on every rank"},
    Key{"checkpoint.load_universal", kFlag, "false", "", kHint, "load the universal layout",
        "every checkpoint loads at any world size and stage"},
    Key{"checkpoint.use_node_local_storage", kFlag, "false", "", kHint,
        "every node has its own disk", "all ranks must see the checkpoint's folder"},
    Key{"checkpoint.checkpoint_serialization", kFlag, "true", "", kHint, "serialise while writing",
        kOwnWriter},
    Key{"checkpoint.parallel_write", kSection, "{}", "", kHint, "who writes", kOwnWriter},
    Key{"checkpoint.parallel_write.pipeline_stage", kFlag, "false", "", kHint,
        "pipeline stages write in parallel", kOwnWriter},
    Key{"checkpoint.writer", kSection, "{}", "", kHint, "how it is written", kOwnWriter},
    Key{"checkpoint.writer.type", kText, "\"FAST\"", "", kHint, "writer", kOwnWriter},
    Key{"checkpoint.writer.io_buffer_size", kBytes, "67108864", "> 0", kHint, "staging bytes",
        kOwnWriter},
    Key{"checkpoint.writer.io_buffer_double", kFlag, "true", "", kHint, "two staging buffers",
        kOwnWriter},
    Key{"checkpoint.writer.io_multiplier", kInteger, "1", "> 0", kHint, "files written at a time",
        kOwnWriter},
    Key{"checkpoint.writer.show_statistics", kFlag, "false", "", kMissed, "print speeds",
        kOwnWriter},
    Key{"checkpoint.writer.data_parallel", kText, "null", "", kHint, "who shares the writing",
        kOwnWriter},
    Key{"checkpoint.writer.decoupled", kFlag, "false", "", kHint, "write in the background",
        kOwnWriter},

    Key{"activation_checkpointing", kSection, "{}", "", kHint, "deepspeed.checkpointing",
        kOwnCheckpointing},
    Key{"activation_checkpointing.partition_activations", kFlag, "false", "", kMissed,
        "shard saved activations", kOwnCheckpointing},
    Key{"activation_checkpointing.contiguous_memory_optimization", kFlag, "false", "", kMissed,
        "copy them into one buffer", kOwnCheckpointing},
    Key{"activation_checkpointing.cpu_checkpointing", kFlag, "false", "", kMissed,
        "keep them on the host", kOwnCheckpointing},
    Key{"activation_checkpointing.number_checkpoints", kInteger, "null", ">= 0", kHint, "how many",
        kOwnCheckpointing},
    Key{"activation_checkpointing.synchronize_checkpoint_boundary", kFlag, "false", "", kHint,
        "synchronise at each", kOwnCheckpointing},
    Key{"activation_checkpointing.profile", kFlag, "false", "", kMissed, "time them",
        kOwnCheckpointing},

    Key{"wall_clock_breakdown", kFlag, "false", "", kShown,
        "a line a step with the times of forward, backward and update, by the device's clock"},
    Key{"memory_breakdown", kFlag, "false", "", kShown,
        "a line a step with the memory in use and at its peak"},
    Key{"dump_state", kFlag, "false", "", kShown, "list every setting at the start"},
    Key{"log_level", kWord, "null", "debug|info|warning|error|critical", kShown,
        "level of the logger \"strata\"; the environment's STRATA_LOG_LEVEL takes precedence"},
    Key{"timers", kSection, "{}", "", kShown, "how fast training is"},
    Key{"timers.throughput", kSection, "{}", "", kShown, "at each steps_per_print"},
    Key{"timers.throughput.enabled", kFlag, "true", "", kShown,
        "a line with samples and tokens a second; with floating-point operations, too, if this key "
        "is in the configuration: they are counted in the second step"},
    Key{"timers.throughput.synchronized", kFlag, "true", "", kHint, "wait for the device",
        "speeds are means over many steps, and no step waits"},
    Key{"flops_profiler", kSection, "{}", "", kShown, "a table of operations by module"},
    Key{"flops_profiler.enabled", kFlag, "false", "", kShown, "whether it is made"},
    Key{"flops_profiler.recompute_fwd_factor", kNumber, "0.0", ">= 0", kHint, "recomputed share",
        "what backward computes again is counted"},
    Key{"flops_profiler.profile_step", kInteger, "1", "", kShown,
        "steps before the one that is counted"},
    Key{"flops_profiler.module_depth", kInteger, "-1", "", kShown,
        "how deep the table goes; -1: to the last module"},
    Key{"flops_profiler.top_modules", kInteger, "1", "", kShown,
        "how many classes of modules are listed at each depth"},
    Key{"flops_profiler.detailed", kFlag, "true", "", kShown, "a row for every module"},
    Key{"flops_profiler.output_file", kText, "null", "", kShown,
        "a file to write the table to, in place of the log"},
    Key{"comms_logger", kSection, "{}", "", kShown, "gathers and reductions"},
    Key{"comms_logger.enabled", kFlag, "false", "", kShown,
        "time them; deepspeed.comm.log_summary() and engine.step_report() show the times"},
    Key{"comms_logger.verbose", kFlag, "false", "", kShown, "a line a step with them"},
    Key{"comms_logger.prof_all", kFlag, "true", "", kHint, "all of them", "all are timed together"},
    Key{"comms_logger.debug", kFlag, "false", "", kMissed, "with the caller",
        "transfers belong to units and not to calls; strata.trace shows each with its unit"},
    Key{"comms_logger.prof_ops", kStrings, "[]", "", kHint, "which of them",
        "all are timed together"},

    Key{"tensorboard", kSection, "{}", "", kShown, "metrics to TensorBoard, by rank 0"},
    Key{"tensorboard.enabled", kFlag, "false", "", kShown, "whether they are written"},
    Key{"tensorboard.output_path", kText, "\"\"", "", kShown, "folder"},
    Key{"tensorboard.job_name", kText, "\"DeepSpeedJobName\"", "", kShown, "folder within it"},
    Key{"wandb", kSection, "{}", "", kShown, "metrics to Weights & Biases, by rank 0"},
    Key{"wandb.enabled", kFlag, "false", "", kShown, "whether they are written"},
    Key{"wandb.group", kText, "null", "", kShown, "group of the run"},
    Key{"wandb.team", kText, "null", "", kShown, "entity of the run"},
    Key{"wandb.project", kText, "\"deepspeed\"", "", kShown, "project of the run"},
    Key{"csv_monitor", kSection, "{}", "", kShown, "metrics to CSV files, by rank 0"},
    Key{"csv_monitor.enabled", kFlag, "false", "", kShown, "whether they are written"},
    Key{"csv_monitor.output_path", kText, "\"\"", "", kShown, "folder"},
    Key{"csv_monitor.job_name", kText, "\"DeepSpeedJobName\"", "", kShown, "folder within it"},
    Key{"comet", kSection, "{}", "", kShown, "metrics to Comet, by rank 0"},
    Key{"comet.enabled", kFlag, "false", "", kShown, "whether they are written"},
    Key{"comet.samples_log_interval", kInteger, "100", "", kShown,
        "samples between two values of one metric"},
    Key{"comet.project", kText, "null", "", kShown, "project"},
    Key{"comet.workspace", kText, "null", "", kShown, "workspace"},
    Key{"comet.api_key", kText, "null", "", kShown, "key"},
    Key{"comet.experiment_name", kText, "null", "", kShown, "name of the experiment"},
    Key{"comet.experiment_key", kText, "null", "", kShown, "key of the experiment"},
    Key{"comet.online", kFlag, "null", "", kShown, "false: kept on this host"},
    Key{"comet.mode", kText, "null", "", kShown, "get, create or get_or_create"},
};

}  // namespace

std::span<const Key> feature_keys() {
  return kFeaturesKeys;
}

std::span<const Key> diagnostics_keys() {
  return kDiagnosticsKeys;
}

}  // namespace strata::engine
