// Rows of checkpoints, activation checkpointing and diagnostics.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define OWN_WRITER "shards are written through a ring of buffers, all ranks at once"
#define OWN_CHECKPOINTING "activation checkpointing is torch.utils.checkpoint's or the model's own"
#define NO_MONITOR "metrics are not sent anywhere; log the loss and engine.get_global_grad_norm()"
#define NO_PROFILE "profile with torch.profiler"

constexpr std::array kDiagnosticsKeys{
    Key{"checkpoint", kSection, "{}", "", kHonoured, "checkpoints that training goes on from", ""},
    Key{"checkpoint.async", kFlag, "false", "", kHonoured,
        "save_checkpoint copies the shards to the host and returns; they are written beside the "
        "next "
        "steps",
        ""},
    Key{"checkpoint.keep", kInteger, "0", ">= 0", kHonoured,
        "how many whole checkpoints stay in a folder: after a new one stands, the oldest go; 0: "
        "all",
        ""},
    Key{"checkpoint.tag_validation", kWord, "\"Warn\"", "Warn|Ignore|Fail", kHint,
        "what to do when ranks name different tags", "it is always an error, on every rank"},
    Key{"checkpoint.load_universal", kFlag, "false", "", kHint, "load the universal layout",
        "every checkpoint loads at any world size and stage"},
    Key{"checkpoint.use_node_local_storage", kFlag, "false", "", kHint,
        "every node has its own disk", "all ranks must see the checkpoint's folder"},
    Key{"checkpoint.checkpoint_serialization", kFlag, "true", "", kHint, "serialise while writing",
        OWN_WRITER},
    Key{"checkpoint.parallel_write", kSection, "{}", "", kHint, "who writes", OWN_WRITER},
    Key{"checkpoint.parallel_write.pipeline_stage", kFlag, "false", "", kHint,
        "pipeline stages write in parallel", OWN_WRITER},
    Key{"checkpoint.writer", kSection, "{}", "", kHint, "how it is written", OWN_WRITER},
    Key{"checkpoint.writer.type", kText, "\"FAST\"", "", kHint, "writer", OWN_WRITER},
    Key{"checkpoint.writer.io_buffer_size", kBytes, "67108864", "> 0", kHint, "staging bytes",
        OWN_WRITER},
    Key{"checkpoint.writer.io_buffer_double", kFlag, "true", "", kHint, "two staging buffers",
        OWN_WRITER},
    Key{"checkpoint.writer.io_multiplier", kInteger, "1", "> 0", kHint, "files written at a time",
        OWN_WRITER},
    Key{"checkpoint.writer.show_statistics", kFlag, "false", "", kHint, "print speeds", OWN_WRITER},
    Key{"checkpoint.writer.data_parallel", kText, "null", "", kHint, "who shares the writing",
        OWN_WRITER},
    Key{"checkpoint.writer.decoupled", kFlag, "false", "", kHint, "write in the background",
        OWN_WRITER},

    Key{"activation_checkpointing", kSection, "{}", "", kHint, "deepspeed.checkpointing",
        OWN_CHECKPOINTING},
    Key{"activation_checkpointing.partition_activations", kFlag, "false", "", kHint,
        "shard saved activations", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.contiguous_memory_optimization", kFlag, "false", "", kHint,
        "copy them into one buffer", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.cpu_checkpointing", kFlag, "false", "", kHint,
        "keep them on the host", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.number_checkpoints", kInteger, "null", ">= 0", kHint, "how many",
        OWN_CHECKPOINTING},
    Key{"activation_checkpointing.synchronize_checkpoint_boundary", kFlag, "false", "", kHint,
        "synchronise at each", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.profile", kFlag, "false", "", kHint, "time them",
        OWN_CHECKPOINTING},

    Key{"wall_clock_breakdown", kFlag, "false", "", kHint, "time forward, backward, step",
        NO_PROFILE},
    Key{"memory_breakdown", kFlag, "false", "", kHint, "print memory", NO_PROFILE},
    Key{"dump_state", kFlag, "false", "", kHint, "print the state", "Config::digest holds it"},
    Key{"log_level", kWord, "null", "debug|info|warning|error|critical", kHonoured,
        "level of the logger \"strata\"; null: as it is", ""},
    Key{"timers", kSection, "{}", "", kHint, "timers", NO_PROFILE},
    Key{"timers.throughput", kSection, "{}", "", kHint, "samples per second", NO_PROFILE},
    Key{"timers.throughput.enabled", kFlag, "true", "", kHint, "whether it is on", NO_PROFILE},
    Key{"timers.throughput.synchronized", kFlag, "true", "", kHint, "wait for the device",
        NO_PROFILE},
    Key{"flops_profiler", kSection, "{}", "", kHint, "profiler of operations", NO_PROFILE},
    Key{"flops_profiler.enabled", kFlag, "false", "", kHint, "whether it is on", NO_PROFILE},
    Key{"flops_profiler.recompute_fwd_factor", kNumber, "0.0", ">= 0", kHint, "recomputed share",
        NO_PROFILE},
    Key{"flops_profiler.profile_step", kInteger, "1", "", kHint, "which step", NO_PROFILE},
    Key{"flops_profiler.module_depth", kInteger, "-1", "", kHint, "depth printed", NO_PROFILE},
    Key{"flops_profiler.top_modules", kInteger, "1", "", kHint, "modules printed", NO_PROFILE},
    Key{"flops_profiler.detailed", kFlag, "true", "", kHint, "print all", NO_PROFILE},
    Key{"flops_profiler.output_file", kText, "null", "", kHint, "where to", NO_PROFILE},
    Key{"comms_logger", kSection, "{}", "", kHint, "log of collectives", NO_PROFILE},
    Key{"comms_logger.enabled", kFlag, "false", "", kHint, "whether it is on", NO_PROFILE},
    Key{"comms_logger.verbose", kFlag, "false", "", kHint, "a line a collective", NO_PROFILE},
    Key{"comms_logger.prof_all", kFlag, "true", "", kHint, "all of them", NO_PROFILE},
    Key{"comms_logger.debug", kFlag, "false", "", kHint, "with the caller", NO_PROFILE},
    Key{"comms_logger.prof_ops", kStrings, "[]", "", kHint, "which of them", NO_PROFILE},

    Key{"tensorboard", kSection, "{}", "", kHint, "metrics to TensorBoard", NO_MONITOR},
    Key{"tensorboard.enabled", kFlag, "false", "", kHint, "whether it is on", NO_MONITOR},
    Key{"tensorboard.output_path", kText, "\"\"", "", kHint, "folder", NO_MONITOR},
    Key{"tensorboard.job_name", kText, "\"DeepSpeedJobName\"", "", kHint, "name", NO_MONITOR},
    Key{"wandb", kSection, "{}", "", kHint, "metrics to Weights & Biases", NO_MONITOR},
    Key{"wandb.enabled", kFlag, "false", "", kHint, "whether it is on", NO_MONITOR},
    Key{"wandb.group", kText, "null", "", kHint, "group", NO_MONITOR},
    Key{"wandb.team", kText, "null", "", kHint, "team", NO_MONITOR},
    Key{"wandb.project", kText, "\"deepspeed\"", "", kHint, "project", NO_MONITOR},
    Key{"csv_monitor", kSection, "{}", "", kHint, "metrics to CSV files", NO_MONITOR},
    Key{"csv_monitor.enabled", kFlag, "false", "", kHint, "whether it is on", NO_MONITOR},
    Key{"csv_monitor.output_path", kText, "\"\"", "", kHint, "folder", NO_MONITOR},
    Key{"csv_monitor.job_name", kText, "\"DeepSpeedJobName\"", "", kHint, "name", NO_MONITOR},
    Key{"comet", kSection, "{}", "", kHint, "metrics to Comet", NO_MONITOR},
    Key{"comet.enabled", kFlag, "false", "", kHint, "whether it is on", NO_MONITOR},
    Key{"comet.samples_log_interval", kInteger, "100", "", kHint, "samples a line", NO_MONITOR},
    Key{"comet.project", kText, "null", "", kHint, "project", NO_MONITOR},
    Key{"comet.workspace", kText, "null", "", kHint, "workspace", NO_MONITOR},
    Key{"comet.api_key", kText, "null", "", kHint, "key", NO_MONITOR},
    Key{"comet.experiment_name", kText, "null", "", kHint, "name", NO_MONITOR},
    Key{"comet.experiment_key", kText, "null", "", kHint, "key of the experiment", NO_MONITOR},
    Key{"comet.online", kFlag, "null", "", kHint, "online or not", NO_MONITOR},
    Key{"comet.mode", kText, "null", "", kHint, "mode", NO_MONITOR},
};

#undef OWN_WRITER
#undef OWN_CHECKPOINTING
#undef NO_MONITOR
#undef NO_PROFILE

}  // namespace

std::span<const Key> diagnostics_keys() {
  return kDiagnosticsKeys;
}

}  // namespace strata::engine
