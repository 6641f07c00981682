// Rows of Strata's own section.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

constexpr std::array kStrataKeys{
    Key{"strata", kSection, "{}", "", kHonoured, "Strata's own settings", ""},
    Key{"strata.reduce_at", kChoice, "\"micro_step\"", "micro_step|boundary", kHonoured,
        "when gradients are reduced: after every backward, or once a step (keeps whole gradients)",
        ""},
    Key{"strata.refresh_at", kChoice, "\"auto\"", "auto|step|forward", kHonoured,
        "when weights that stay whole are brought up to date after an update: before step() is "
        "over, or beside the next forward, each block when it is used; who reads a parameter "
        "before waits for it; auto: forward on GPUs, unless overlap_comm is false",
        ""},
    Key{"strata.device", kChoice, "\"auto\"", "auto|cpu|cuda", kHonoured,
        "where the model trains; auto: where it lies, and models on the host go to the rank's GPU",
        ""},
    Key{"strata.move_inputs", kFlag, "true", "", kHonoured,
        "whether tensors of the host among the arguments of the model's forward and generate are "
        "copied to its device",
        ""},
    Key{"strata.collectives", kChoice, "\"auto\"", "auto|local|shm|c10d|nccl|peer", kHonoured,
        "how ranks talk: threads of one process, processes of one host, torch.distributed; between "
        "GPUs peer (copy engines between GPUs of one host) or nccl for weights and gradients; auto "
        "takes peer where all GPUs reach each other",
        ""},
    Key{"strata.gather", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "what carries weights between GPUs that are one shard group, where that shall not be what "
        "carries gradients; auto: as strata.collectives says. Where that is auto, too, and NCCL "
        "runs already (the script has used it, or strata.reduce names it), a probe of some "
        "milliseconds compares both, and takes nccl if that is 1.5 times as fast: it computes on "
        "what the model computes on. NCCL is not started for a probe, since that takes a second",
        ""},
    Key{"strata.reduce", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "what carries gradients, likewise; peer adds up in fp32 what travels in 16 bits, nccl in "
        "communication_data_type, and in an order of its own",
        ""},
    Key{"strata.max_live_bytes", kBytes, "null", "> 0", kHonoured,
        "most bytes of gathered parameters a rank, kept from forward to backward as far as they "
        "fit; null or \"auto\": from stage3_max_live_parameters",
        ""},
    Key{"strata.wrap", kStrings, "[]", "", kHonoured,
        "classes of the blocks that become units; []: found by themselves", ""},
    Key{"strata.unit_size", kBytes, "null", "> 0", kHonoured,
        "bytes of a unit where the size rule forms them; null or \"auto\": the engine's own", ""},
    Key{"strata.threads", kInteger, "null", "1..1024", kHonoured,
        "threads of a rank that work on host memory; null or \"auto\": cores / ranks of the host, "
        "at most 32 (rank 0 at its start more, where it reads a whole model on the host); on cores "
        "of the rank's own where a launcher starts several on a host",
        ""},
    Key{"strata.init", kSection, "{}", "", kHonoured, "how a model gets into the engine", ""},
    Key{"strata.init.tier", kChoice, "\"auto\"", "auto|device_copy|device_grow|distributed|host",
        kHonoured,
        "the way of the values of a model that is already built; auto: the first of them that "
        "every "
        "rank has room for",
        ""},
    Key{"strata.init.read", kChoice, "\"auto\"", "auto|buffered|direct", kHonoured,
        "how a checkpoint's files are read: through the page cache, or past it (O_DIRECT, where "
        "that can be had); auto: each rank takes what is faster, by what is cached and, where that "
        "is little, a short probe",
        ""},
    Key{"strata.init.replay_above", kNumel, "1048576", ">= 0", kHonoured,
        "elements: within zero.Init a floating parameter of more is born without memory, and what "
        "its constructors do is replayed piece by piece, with random numbers that do not depend on "
        "the number of ranks; smaller ones are built as torch builds them",
        ""},
    Key{"strata.init.report", kText, "null", "", kHonoured,
        "file to which rank 0 writes, as JSON, how start-up went; null: nowhere", ""},
    Key{"strata.timeout_s", kNumber, "300.0", "> 0", kHonoured,
        "seconds after which a rank that waits for another reports an error", ""},
    Key{"strata.decay_unused", kFlag, "false", "", kHonoured,
        "a parameter that no rank gave a gradient in a step is updated all the same, as under "
        "DeepSpeed: it decays and its momentum goes on; false: it is left as it is, as in torch",
        ""},
    Key{"strata.max_skipped_steps", kInteger, "20", "0..1000000", kHonoured,
        "steps in a row that may be skipped because gradients were not finite (fp32 and bf16); the "
        "next one raises NumericsError; 0: the first does",
        ""},
    Key{"strata.trace", kText, "null", "", kHonoured,
        "file to which rank 0 writes a timeline of some steps, of all ranks, for "
        "ui.perfetto.dev: gathers, reductions, waits, computing, the optimizer, by unit; null: "
        "nowhere",
        ""},
    Key{"strata.placement", kRules, "[]", "", kHonoured,
        "rules for single parameters, the first that names one counts: `match`, a pattern of "
        "names, "
        "or `larger_than`, bytes (\"200MB\"), or both; `param` and `optimizer`, where its weights "
        "and "
        "optimizer state rest: \"device\", \"host\", \"nvme\"; folders and staging are those of "
        "offload_param and offload_optimizer. \"auto\": the device is filled first, then the host, "
        "then the drive of an nvme_path, with what a step uses least in the last of them",
        ""},
    Key{"strata.device_budget", kBytes, "null", "> 0", kHonoured,
        "bytes of its device that a rank's engine may hold at its peak where placement is "
        "\"auto\"; activations come on top. null or \"auto\": two thirds of what is free at the "
        "start; on CPU ranks: no bound, so that nothing is offloaded",
        ""},
    Key{"strata.host_budget", kBytes, "null", "> 0", kHonoured,
        "bytes of host memory, likewise, that a rank may take for what is offloaded and staged; "
        "null or \"auto\": a rank's share of three quarters of what is available at the start",
        ""},
    Key{"strata.verify_drives", kFlag, "false", "", kHonoured,
        "a checksum of each page that is written to a drive under offload is kept in memory (8 "
        "bytes for 4 KiB), and compared when the page is read: a drive that gives back something "
        "else is an error",
        ""},
    Key{"strata.tiles", kSection, "{}", "", kHonoured,
        "parameters that are gathered, used and reduced in tiles of rows (stage 3)", ""},
    Key{"strata.tiles.max_gather", kBytes, "null", "> 0", kHonoured,
        "most bytes of one parameter that are gathered at once: a larger one is cut into tiles of "
        "at most so many. null or \"auto\": tiles of 256 MiB of what takes more than half of what "
        "a "
        "rank's GPU has free beside the model at the start, where there is a rule for it; on CPU "
        "ranks: none",
        ""},
    Key{"strata.tiles.match", kStrings, "[]", "", kHonoured,
        "patterns of names: of the parameters that are larger, only those that one of them names "
        "are cut; []: all",
        ""},
    Key{"strata.trace_steps", kInteger, "3", "1..100", kHonoured,
        "steps that are in the timeline, after two that warm up", ""},
};

}  // namespace

std::span<const Key> strata_keys() {
  return kStrataKeys;
}

}  // namespace strata::engine
