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
        "when whole weights are all-gathered after an update (stages 0 to 2): in step(), "
        "or lazily, beside the next forward; a read of a parameter waits for it; auto: "
        "forward on GPUs, unless overlap_comm is false",
        ""},
    Key{"strata.device", kChoice, "\"auto\"", "auto|cpu|cuda", kHonoured,
        "where the model trains; auto: on its current device, and models on the host move "
        "to the rank's GPU",
        ""},
    Key{"strata.move_inputs", kFlag, "true", "", kHonoured,
        "copy host tensors among the arguments of forward and generate to the model's "
        "device",
        ""},
    Key{"strata.collectives", kChoice, "\"auto\"", "auto|local|shm|c10d|nccl|peer", kHonoured,
        "the transport between ranks: threads of one process (local), shared memory of "
        "one host (shm), torch.distributed (c10d); between GPUs copies (peer) or nccl for "
        "weights and gradients; auto: peer where all GPUs of a host reach each other",
        ""},
    Key{"strata.gather", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "the transport of weights between GPUs of one shard group, if it shall differ "
        "from that of gradients; auto: from strata.collectives. If both are auto and NCCL "
        "runs already (the script uses it, or strata.reduce names it), a probe of some "
        "milliseconds compares both transports and selects nccl if it is 1.5 times as "
        "fast, because nccl takes multiprocessors from the model. The engine does not "
        "start NCCL for a probe, since that takes a second",
        ""},
    Key{"strata.reduce", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "the transport of gradients between GPUs, as strata.gather for weights; peer sums "
        "16-bit gradients in fp32 and in rank order, nccl in communication_data_type and "
        "in its own order",
        ""},
    Key{"strata.max_live_bytes", kBytes, "null", "> 0", kHonoured,
        "upper bound on a rank's gathered bytes; gathered weights stay from forward to "
        "backward within it; null or \"auto\": from stage3_max_live_parameters",
        ""},
    Key{"strata.wrap", kStrings, "[]", "", kHonoured,
        "classes of the blocks that become units; []: the engine finds blocks", ""},
    Key{"strata.unit_size", kBytes, "null", "> 0", kHonoured,
        "bytes of a unit where units are formed by size; null or \"auto\": the engine's "
        "own",
        ""},
    Key{"strata.threads", kInteger, "null", "1..1024", kHonoured,
        "threads of a rank for work on host memory; null or \"auto\": cores / ranks of "
        "the host, at most 32 (rank 0 uses more while it reads a whole model on the host "
        "at its start); if a launcher starts several ranks on a host, they run on the "
        "rank's own cores",
        ""},
    Key{"strata.init", kSection, "{}", "", kHonoured, "how a model's values reach the engine", ""},
    Key{"strata.init.tier", kChoice, "\"auto\"", "auto|device_copy|device_grow|distributed|host",
        kHonoured,
        "the way for the values of a model that the script has built; auto: the first way "
        "for which every rank has memory",
        ""},
    Key{"strata.init.read", kChoice, "\"auto\"", "auto|buffered|direct", kHonoured,
        "read a checkpoint's files through the page cache (buffered) or past it (direct, "
        "O_DIRECT); auto: each rank measures, unless most bytes are cached",
        ""},
    Key{"strata.init.replay_above", kNumel, "1048576", ">= 0", kHonoured,
        "under zero.Init, a floating-point parameter of more elements gets no memory: its "
        "constructors are recorded and replayed on its shard, with random numbers that do "
        "not depend on the number of ranks; smaller ones are built as in torch",
        ""},
    Key{"strata.init.report", kText, "null", "", kHonoured,
        "file to which rank 0 writes the start-up report as JSON; null: none", ""},
    Key{"strata.timeout_s", kNumber, "300.0", "> 0", kHonoured,
        "seconds after which a rank that waits for another raises an error", ""},
    Key{"strata.decay_unused", kFlag, "false", "", kHonoured,
        "true: update a parameter without a gradient on any rank, as DeepSpeed does: it "
        "decays and its momentum goes on; false: it keeps its value, as in torch",
        ""},
    Key{"strata.max_skipped_steps", kInteger, "20", "0..1000000", kHonoured,
        "consecutive steps that may be skipped because gradients were not finite (fp32 "
        "and bf16); the next one raises NumericsError; 0: the first one does",
        ""},
    Key{"strata.trace", kText, "null", "", kHonoured,
        "file to which rank 0 writes a timeline of some steps of all ranks for "
        "ui.perfetto.dev; null: none",
        ""},
    Key{"strata.placement", kRules, "[]", "", kHonoured,
        "rules for single parameters; the first matching rule applies: `match`, a pattern "
        "of names, or `larger_than`, bytes (\"200MB\"), or both; `param` and `optimizer`, "
        "the tier of its weights and optimizer states: \"device\", \"host\", \"nvme\"; "
        "folders and staging are those of offload_param and offload_optimizer. \"auto\": "
        "the engine fills the device first, then the host, then the drive of an "
        "nvme_path, with the least used state last",
        ""},
    Key{"strata.device_budget", kBytes, "null", "> 0", kHonoured,
        "bytes that the engine may hold on its device when placement is \"auto\", without "
        "activations; null or \"auto\": two thirds of the free memory at the start; no "
        "bound on CPU ranks, so nothing is offloaded",
        ""},
    Key{"strata.host_budget", kBytes, "null", "> 0", kHonoured,
        "bytes of host memory that a rank may use for offloaded state and staging; null "
        "or \"auto\": its share of three quarters of the available memory at the start",
        ""},
    Key{"strata.verify_drives", kFlag, "false", "", kHonoured,
        "keep a checksum of each page written to a drive under offload (8 bytes for 4 "
        "KiB), and compare it when the page is read; a difference is an error",
        ""},
    Key{"strata.tiles", kSection, "{}", "", kHonoured,
        "parameters that are gathered, used and reduced in tiles of rows (stage 3)", ""},
    Key{"strata.tiles.max_gather", kBytes, "null", "> 0", kHonoured,
        "upper bound on gathered bytes of one parameter; a larger one is cut into tiles. "
        "null or \"auto\": tiles of 256 MiB for parameters that take more than half of "
        "the free memory of the fullest GPU, where a tiling rule exists; none on CPU "
        "ranks",
        ""},
    Key{"strata.tiles.match", kStrings, "[]", "", kHonoured,
        "patterns of names: only parameters that match one are cut; []: all", ""},
    Key{"strata.trace_steps", kInteger, "3", "1..100", kHonoured,
        "steps in the timeline, after two warm-up steps", ""},
};

}  // namespace

std::span<const Key> strata_keys() {
  return kStrataKeys;
}

}  // namespace strata::engine
