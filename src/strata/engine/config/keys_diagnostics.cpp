// Rows of checkpoints, activation checkpointing and diagnostics.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define OWN_WRITER "shards are written through a ring of buffers, all ranks at once"
#define OWN_CHECKPOINTING "activation checkpointing is torch.utils.checkpoint's or the model's own"

constexpr std::array kDiagnosticsKeys{
    Key{"checkpoint", kSection, "{}", "", kHonoured, "checkpoints of training", ""},
    Key{"checkpoint.async", kFlag, "false", "", kHonoured,
        "save_checkpoint copies the shards to the host and returns; a thread writes them "
        "during the next steps",
        ""},
    Key{"checkpoint.keep", kInteger, "0", ">= 0", kHonoured,
        "number of checkpoints that stay in a folder; a new one removes the oldest; 0: "
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
    Key{"checkpoint.writer.show_statistics", kFlag, "false", "", kMissed, "print speeds",
        OWN_WRITER},
    Key{"checkpoint.writer.data_parallel", kText, "null", "", kHint, "who shares the writing",
        OWN_WRITER},
    Key{"checkpoint.writer.decoupled", kFlag, "false", "", kHint, "write in the background",
        OWN_WRITER},

    Key{"activation_checkpointing", kSection, "{}", "", kHint, "deepspeed.checkpointing",
        OWN_CHECKPOINTING},
    Key{"activation_checkpointing.partition_activations", kFlag, "false", "", kMissed,
        "shard saved activations", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.contiguous_memory_optimization", kFlag, "false", "", kMissed,
        "copy them into one buffer", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.cpu_checkpointing", kFlag, "false", "", kMissed,
        "keep them on the host", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.number_checkpoints", kInteger, "null", ">= 0", kHint, "how many",
        OWN_CHECKPOINTING},
    Key{"activation_checkpointing.synchronize_checkpoint_boundary", kFlag, "false", "", kHint,
        "synchronise at each", OWN_CHECKPOINTING},
    Key{"activation_checkpointing.profile", kFlag, "false", "", kMissed, "time them",
        OWN_CHECKPOINTING},

    Key{"wall_clock_breakdown", kFlag, "false", "", kShown,
        "a line a step with the times of forward, backward and update, by the device's clock", ""},
    Key{"memory_breakdown", kFlag, "false", "", kShown,
        "a line a step with the memory in use and at its peak", ""},
    Key{"dump_state", kFlag, "false", "", kShown, "list every setting at the start", ""},
    Key{"log_level", kWord, "null", "debug|info|warning|error|critical", kShown,
        "level of the logger \"strata\"; the environment's STRATA_LOG_LEVEL takes "
        "precedence",
        ""},
    Key{"timers", kSection, "{}", "", kShown, "how fast training is", ""},
    Key{"timers.throughput", kSection, "{}", "", kShown, "at each steps_per_print", ""},
    Key{"timers.throughput.enabled", kFlag, "true", "", kShown,
        "a line with samples and tokens a second; with floating-point operations, too, if "
        "this key is in the configuration: they are counted in the second step",
        ""},
    Key{"timers.throughput.synchronized", kFlag, "true", "", kHint, "wait for the device",
        "speeds are means over many steps, and no step waits"},
    Key{"flops_profiler", kSection, "{}", "", kShown, "a table of operations by module", ""},
    Key{"flops_profiler.enabled", kFlag, "false", "", kShown, "whether it is made", ""},
    Key{"flops_profiler.recompute_fwd_factor", kNumber, "0.0", ">= 0", kHint, "recomputed share",
        "what backward computes again is counted"},
    Key{"flops_profiler.profile_step", kInteger, "1", "", kShown,
        "steps before the one that is counted", ""},
    Key{"flops_profiler.module_depth", kInteger, "-1", "", kShown,
        "how deep the table goes; -1: to the last module", ""},
    Key{"flops_profiler.top_modules", kInteger, "1", "", kShown,
        "how many classes of modules are listed at each depth", ""},
    Key{"flops_profiler.detailed", kFlag, "true", "", kShown, "a row for every module", ""},
    Key{"flops_profiler.output_file", kText, "null", "", kShown,
        "a file to write the table to, in place of the log", ""},
    Key{"comms_logger", kSection, "{}", "", kShown, "gathers and reductions", ""},
    Key{"comms_logger.enabled", kFlag, "false", "", kShown,
        "time them; deepspeed.comm.log_summary() and engine.step_report() show the times", ""},
    Key{"comms_logger.verbose", kFlag, "false", "", kShown, "a line a step with them", ""},
    Key{"comms_logger.prof_all", kFlag, "true", "", kHint, "all of them", "all are timed together"},
    Key{"comms_logger.debug", kFlag, "false", "", kMissed, "with the caller",
        "transfers belong to units and not to calls; strata.trace shows each with its unit"},
    Key{"comms_logger.prof_ops", kStrings, "[]", "", kHint, "which of them",
        "all are timed together"},

    Key{"tensorboard", kSection, "{}", "", kShown, "metrics to TensorBoard, by rank 0", ""},
    Key{"tensorboard.enabled", kFlag, "false", "", kShown, "whether they are written", ""},
    Key{"tensorboard.output_path", kText, "\"\"", "", kShown, "folder", ""},
    Key{"tensorboard.job_name", kText, "\"DeepSpeedJobName\"", "", kShown, "folder within it", ""},
    Key{"wandb", kSection, "{}", "", kShown, "metrics to Weights & Biases, by rank 0", ""},
    Key{"wandb.enabled", kFlag, "false", "", kShown, "whether they are written", ""},
    Key{"wandb.group", kText, "null", "", kShown, "group of the run", ""},
    Key{"wandb.team", kText, "null", "", kShown, "entity of the run", ""},
    Key{"wandb.project", kText, "\"deepspeed\"", "", kShown, "project of the run", ""},
    Key{"csv_monitor", kSection, "{}", "", kShown, "metrics to CSV files, by rank 0", ""},
    Key{"csv_monitor.enabled", kFlag, "false", "", kShown, "whether they are written", ""},
    Key{"csv_monitor.output_path", kText, "\"\"", "", kShown, "folder", ""},
    Key{"csv_monitor.job_name", kText, "\"DeepSpeedJobName\"", "", kShown, "folder within it", ""},
    Key{"comet", kSection, "{}", "", kShown, "metrics to Comet, by rank 0", ""},
    Key{"comet.enabled", kFlag, "false", "", kShown, "whether they are written", ""},
    Key{"comet.samples_log_interval", kInteger, "100", "", kShown,
        "samples between two values of one metric", ""},
    Key{"comet.project", kText, "null", "", kShown, "project", ""},
    Key{"comet.workspace", kText, "null", "", kShown, "workspace", ""},
    Key{"comet.api_key", kText, "null", "", kShown, "key", ""},
    Key{"comet.experiment_name", kText, "null", "", kShown, "name of the experiment", ""},
    Key{"comet.experiment_key", kText, "null", "", kShown, "key of the experiment", ""},
    Key{"comet.online", kFlag, "null", "", kShown, "false: kept on this host", ""},
    Key{"comet.mode", kText, "null", "", kShown, "get, create or get_or_create", ""},
};

#undef OWN_WRITER
#undef OWN_CHECKPOINTING

}  // namespace

std::span<const Key> diagnostics_keys() {
  return kDiagnosticsKeys;
}

}  // namespace strata::engine
