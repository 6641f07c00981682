// Rows of zero_optimization with its offload, of aio, and of Strata's own section.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define ZERO "zero_optimization."

constexpr std::array kZeroKeys{
    Key{"zero_optimization", kSection, "{}", "", kHonoured,
        "the ZeRO stage, its buckets and its offload"},
    Key{ZERO "stage", kInteger, "0", "0..3", kHonoured,
        "0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and parameters"},
    Key{ZERO "reduce_bucket_size", kNumel, "500000000", ">= 0", kHonoured,
        "upper bound on gradient elements under reduction, at least one block; 0: one block after "
        "the other"},
    Key{ZERO "overlap_comm", kFlag, "null", "", kHonoured,
        "false: step() returns when new weights are complete (see strata.refresh_at); reductions "
        "overlap with backward in any case"},
    Key{ZERO "stage3_prefetch_bucket_size", kNumel, "50000000", ">= 0", kHonoured,
        "elements that are gathered before their use; the next unit is always prefetched, unless "
        "this is 0"},
    Key{ZERO "stage3_param_persistence_threshold", kNumel, "0", ">= 0", kHonoured,
        "parameters of at most this many elements stay gathered; DeepSpeed's default is 100000, "
        "because it gathers each parameter alone; Strata gathers small ones with their unit"},
    Key{ZERO "stage3_model_persistence_threshold", kNumel, "9223372036854775807", ">= 0", kHonoured,
        "upper bound on the elements that stay gathered"},
    Key{ZERO "stage3_max_live_parameters", kNumel, "null", ">= 0", kHonoured,
        "upper bound on gathered elements, excluding units in use and the next unit (unless "
        "stage3_prefetch_bucket_size is 0); modules outside blocks share a unit only up to it; "
        "null: 1e9, or stage3_prefetch_bucket_size with stage3_allgather_sequential"},
    Key{ZERO "stage3_max_reuse_distance", kNumel, "null", ">= 0", kHonoured,
        "release a gathered parameter whose next use is more than this many elements away, even if "
        "more may be live; null: stage3_max_live_parameters alone decides"},
    Key{ZERO "stage3_allgather_sequential", kFlag, "false", "", kHonoured,
        "gather one parameter at a time, while the module that owns it runs (small parameters "
        "share a unit); needs less memory and more gathers"},
    Key{ZERO "stage3_partition_stream_chunk_size", kBytes, "8388608", "> 0", kHonoured,
        "bytes of one chunk, in which zero.Init computes and initialize copies a parameter"},
    Key{ZERO "stage3_gather_16bit_weights_on_model_save", kFlag, "false", "", kHonoured,
        "allow a framework to gather the whole weights when it saves"},
    Key{ZERO "enable_sanity_checks", kFlag, "false", "", kHonoured,
        "true: an edit within GatheredParameters(modifier_rank=None) is an error in the stand-in, "
        "too; strata.zero always makes it one"},
    Key{ZERO "ignore_unused_parameters", kFlag, "true", "", kHonoured,
        "whether a trainable parameter may get no gradient in a step"},
    Key{ZERO "leaf_module", kSection, "{}", "", kHonoured,
        "modules that are gathered as one and never split: by class, by name, by the end of the "
        "name"},
    Key{ZERO "leaf_module.classes", kStrings,
        R"(["transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",)"
        R"("transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",)"
        R"("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"])",
        "", kHonoured, "by class"},
    Key{ZERO "leaf_module.names", kStrings, "[]", "", kHonoured, "by module name"},
    Key{ZERO "leaf_module.name_suffixes", kStrings, "[]", "", kHonoured,
        "by the end of the module name"},

    Key{ZERO "mics_shard_size", kInteger, "-1", ">= -1", kHonoured,
        "size of a shard group (MiCS), at stage 3: weights, gradients and optimizer states are "
        "sharded over this many consecutive ranks, and each group holds all of them; must divide "
        "the number of ranks; -1 or 0: one group of all ranks"},
    Key{ZERO "zero_hpz_partition_size", kInteger, "1", ">= 0", kHonoured,
        "size of a group for secondary shards (ZeRO++), at stage 3: each group of this many "
        "consecutive ranks holds all weights, so gathers stay inside it; gradients and optimizer "
        "states are sharded over all ranks; must divide the number of ranks; 0 or 1: no groups"},

    Key{ZERO "mics_hierarchical_params_gather", kFlag, "false", "", kHint,
        "two-level gathers within sub-groups (MiCS)",
        "a gather inside a shard group is one copy from each of its ranks"},
    Key{ZERO "contiguous_gradients", kFlag, "true", "", kHint,
        "copy gradients into a contiguous bucket",
        "gradients always land in their unit's flat buffer"},
    Key{ZERO "reduce_scatter", kFlag, "true", "", kHint, "reduce-scatter rather than all-reduce",
        "every stage reduces by reduce-scatter"},
    Key{ZERO "use_multi_rank_bucket_allreduce", kFlag, "true", "", kHint,
        "all-reduce a bucket and let its owners copy", "every stage reduces by reduce-scatter"},
    Key{ZERO "allgather_partitions", kFlag, "true", "", kHint,
        "all-gather rather than broadcasts after the step", "parameters are always all-gathered"},
    Key{ZERO "allgather_bucket_size", kNumel, "500000000", ">= 0", kHint,
        "elements a gather after the step", "a gather takes one unit; strata.unit_size bounds it"},
    Key{ZERO "compute_grad_norm", kFlag, "true", "", kHint, "compute the global gradient norm",
        "norm and overflow check are one pass that always runs"},
    Key{ZERO "parameter_alignment", kFlag, "false", "", kHint,
        "align parameters in the flat buffer", "parameters are always aligned to 256 bytes"},
    Key{ZERO "load_from_fp32_weights", kFlag, "true", "", kHint,
        "restore master weights from a checkpoint's fp32 copy",
        "loading restores masters wherever there are some; load_module_only loads values alone"},
    Key{ZERO "elastic_checkpoint", kFlag, "false", "", kHint, "old elastic checkpoint layout",
        "a checkpoint loads at any number of ranks and any stage"},
    Key{ZERO "sub_group_size", kNumel, "1000000000", ">= 0", kHint,
        "elements of one optimizer sub-group", "the optimizer steps unit by unit"},
    Key{ZERO "stage3_module_granularity_threshold", kNumel, "0", "", kHint,
        "gather modules below this granularity as one",
        "units are found by block; see strata.wrap"},
    Key{ZERO "stage3_use_all_reduce_for_fetch_params", kFlag, "false", "", kHint,
        "gather by all-reduce", "gathers write in place into the flat buffer"},
    Key{ZERO "round_robin_gradients", kFlag, "false", "", kHint,
        "interleave ownership of gradients", "every rank owns an equal slice of every unit"},
    Key{ZERO "memory_efficient_linear", kFlag, "true", "", kHint,
        "gather the weight of a Linear again in backward",
        "autograd's views stay valid across release and gather"},
    Key{ZERO "pipeline_loading_checkpoint", kFlag, "false", "", kHint,
        "load a checkpoint rank after rank", "every rank reads its own byte ranges only"},
    Key{ZERO "override_module_apply", kFlag, "true", "", kHint, "gather in Module.apply",
        "a released parameter that is read anywhere is gathered on the spot"},
    Key{ZERO "log_trace_cache_warnings", kFlag, "false", "", kMissed,
        "warn when the fetch order changes", "a changed order costs a late gather, nothing else"},
    Key{ZERO "save_muon_momentum_buffer_in_memory", kFlag, "false", "", kHint,
        "keep Muon's momentum gathered", "Muon is not offered"},

    Key{ZERO "legacy_stage1", kFlag, "false", "", kRefused, "the first implementation of stage 1",
        "write \"stage\": 1 alone"},
    Key{ZERO "zenflow", kSwitch, "null", "", kRefused, "asynchronous updates of ZenFlow",
        "remove the section"},
    Key{ZERO "zero_quantized_weights", kFlag, "false", "", kRefused,
        "gathers of quantised weights (ZeRO++)", "write false or remove the key"},
    Key{ZERO "zero_quantized_nontrainable_weights", kFlag, "false", "", kRefused,
        "gathers of quantised frozen weights (ZeRO++)", "write false or remove the key"},
    Key{ZERO "zero_quantized_gradients", kFlag, "false", "", kRefused,
        "reductions of quantised gradients (ZeRO++)",
        "remove the key; \"communication_data_type\": \"bf16\" halves the bytes"},
    Key{ZERO "zeropp_loco_param", kParams, "{}", "", kHint,
        "error feedback of quantised gradients (LoCo)",
        "it is for zero_quantized_gradients, which is not offered"},
};

#undef ZERO

#define PARAM "zero_optimization.offload_param."
#define OPTIM "zero_optimization.offload_optimizer."

constexpr std::array kOffloadKeys{
    Key{"zero_optimization.offload_param", kSection, "{}", "", kHonoured,
        "where sharded weights rest between uses"},
    Key{PARAM "device", kChoice, "\"none\"", "none|cpu|nvme", kHonoured,
        "the tier of this rank's weight shards at stage 3, except persistent ones: \"cpu\" (pinned "
        "host memory) or \"nvme\" (a drive)"},
    Key{PARAM "nvme_path", kTexts, "null", "", kHonoured,
        "an existing folder on the drive, or one on each of several drives, which share the bytes "
        "by their measured speeds; each rank makes its own folder in it"},
    Key{PARAM "buffer_count", kInteger, "5", ">= 0", kHonoured,
        "buffer_count x buffer_size elements of the parameters' dtype is the staging memory for "
        "drives; parameters of any size share it"},
    Key{PARAM "buffer_size", kNumel, "100000000", ">= 0", kHonoured, "see buffer_count"},
    Key{PARAM "max_in_cpu", kNumel, "0", ">= 0", kHonoured,
        "elements added to this memory; parameters that fit stay in it and are not read again; "
        "DeepSpeed's default is 1e9"},
    Key{PARAM "pin_memory", kFlag, "true", "", kHint, "page-locked memory",
        "memory of offloaded parameters is locked where a GPU reads it, and nowhere else"},

    Key{"zero_optimization.offload_optimizer", kSection, "{}", "", kHonoured,
        "where optimizer states rest between steps"},
    Key{OPTIM "device", kChoice, "\"none\"", "none|cpu|nvme", kHonoured,
        "the tier of optimizer states, masters and reduced gradients: \"cpu\" (pinned host memory) "
        "or \"nvme\" (a drive, with gradients on the host)"},
    Key{OPTIM "nvme_path", kTexts, "null", "", kHonoured,
        "an existing folder on the drive, or one on each of several drives, which share the bytes "
        "by their measured speeds; each rank makes its own folder in it"},
    Key{OPTIM "buffer_count", kInteger, "4", ">= 0", kHonoured,
        "buffer_count x buffer_size fp32 elements is the staging memory for drives; tensors of any "
        "size share it"},
    Key{OPTIM "buffer_size", kNumel, "100000000", ">= 0", kHonoured, "see buffer_count"},
    Key{OPTIM "pin_memory", kFlag, "false", "", kHint, "page-locked memory",
        "memory of offloaded states is locked where a GPU works on it, and nowhere else"},
    Key{OPTIM "pipeline_read", kFlag, "false", "", kHint, "read ahead of the step",
        "states on a drive are always read ahead"},
    Key{OPTIM "pipeline_write", kFlag, "false", "", kHint, "write behind the step",
        "states on a drive are always written behind the step"},
    Key{OPTIM "fast_init", kFlag, "false", "", kHint, "write the first state quickly",
        "states that are zero are not written at the start"},
    Key{OPTIM "ratio", kNumber, "1.0", "0..1", kHonoured,
        "share of the elements whose state is offloaded; the state of the first parameters stays "
        "on the device"},
    Key{OPTIM "super_offload", kFlag, "false", "", kRefused, "superchip offload",
        "write false or remove the key"},
    Key{OPTIM "cpuadam_cores_perc", kNumber, "0.8", "0..1", kHint,
        "share of cores for the host step", "strata.threads sets the threads of host kernels"},

    Key{"aio", kSection, "{}", "", kHonoured,
        "how drives are read and written; `strata bench-io` measures good values for a drive"},
    Key{"aio.block_size", kBytes, "1048576", "> 0", kHonoured,
        "bytes of one request, rounded up to 4 KiB; at most 1 GiB"},
    Key{"aio.queue_depth", kInteger, "32", "> 0", kHonoured,
        "requests under way at once for each intra_op_parallelism; at most 4096 in all, and 64 "
        "where threads serve drives because the kernel refuses io_uring"},
    Key{"aio.intra_op_parallelism", kInteger, "1", "> 0", kHonoured, "see queue_depth"},
    Key{"aio.single_submit", kFlag, "false", "", kHint, "one request a submission",
        "requests that wait are handed over together"},
    Key{"aio.overlap_events", kFlag, "true", "", kHint, "submit while completions arrive",
        "completions are always taken as they come"},
    Key{"aio.use_gds", kFlag, "false", "", kHint, "drive to GPU without the host",
        "drives are read and written through pinned memory of the host"},
};

#undef PARAM
#undef OPTIM

constexpr std::array kStrataKeys{
    Key{"strata", kSection, "{}", "", kHonoured, "Strata's own settings"},
    Key{"strata.reduce_at", kChoice, "\"micro_step\"", "micro_step|boundary", kHonoured,
        "when gradients are reduced: after every backward, or once a step (keeps whole gradients)"},
    Key{"strata.refresh_at", kChoice, "\"auto\"", "auto|step|forward", kHonoured,
        "when whole weights are all-gathered after an update (stages 0 to 2): in step(), or "
        "lazily, beside the next forward; a read of a parameter waits for it; auto: forward on "
        "GPUs, unless overlap_comm is false"},
    Key{"strata.device", kChoice, "\"auto\"", "auto|cpu|cuda", kHonoured,
        "where the model trains; auto: on its current device, and models on the host move to the "
        "rank's GPU"},
    Key{"strata.move_inputs", kFlag, "true", "", kHonoured,
        "copy host tensors among the arguments of forward and generate to the model's device"},
    Key{"strata.collectives", kChoice, "\"auto\"", "auto|local|shm|c10d|nccl|peer", kHonoured,
        "the transport between ranks: threads of one process (local), shared memory of one host "
        "(shm), torch.distributed (c10d); between GPUs copies (peer) or nccl for weights and "
        "gradients; auto: peer where all GPUs of a host reach each other"},
    Key{"strata.gather", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "the transport of weights between GPUs of one shard group, if it shall differ from that of "
        "gradients; auto: from strata.collectives. If both are auto and NCCL runs already (the "
        "script uses it, or strata.reduce names it), a probe of some milliseconds compares both "
        "transports and selects nccl if it is 1.5 times as fast, because nccl takes "
        "multiprocessors from the model. The engine does not start NCCL for a probe, since that "
        "takes a second"},
    Key{"strata.reduce", kChoice, "\"auto\"", "auto|peer|nccl", kHonoured,
        "the transport of gradients between GPUs, as strata.gather for weights; peer sums 16-bit "
        "gradients in fp32 and in rank order, nccl in communication_data_type and in its own "
        "order"},
    Key{"strata.max_live_bytes", kBytes, "null", "> 0", kHonoured,
        "upper bound on a rank's gathered bytes; gathered weights stay from forward to backward "
        "within it; null or \"auto\": from stage3_max_live_parameters"},
    Key{"strata.wrap", kStrings, "[]", "", kHonoured,
        "classes of the blocks that become units; []: the engine finds blocks"},
    Key{"strata.unit_size", kBytes, "null", "> 0", kHonoured,
        "bytes of a unit where units are formed by size; null or \"auto\": the engine's own"},
    Key{"strata.threads", kInteger, "null", "1..1024", kHonoured,
        "threads of a rank for work on host memory; null or \"auto\": cores / ranks of the host, "
        "at most 32 (rank 0 uses more while it reads a whole model on the host at its start); if a "
        "launcher starts several ranks on a host, they run on the rank's own cores"},
    Key{"strata.init", kSection, "{}", "", kHonoured, "how a model's values reach the engine"},
    Key{"strata.init.tier", kChoice, "\"auto\"", "auto|device_copy|device_grow|distributed|host",
        kHonoured,
        "the way for the values of a model that the script has built; auto: the first way for "
        "which every rank has memory"},
    Key{"strata.init.read", kChoice, "\"auto\"", "auto|buffered|direct", kHonoured,
        "read a checkpoint's files through the page cache (buffered) or past it (direct, "
        "O_DIRECT); auto: each rank measures, unless most bytes are cached"},
    Key{"strata.init.replay_above", kNumel, "1048576", ">= 0", kHonoured,
        "under zero.Init, a floating-point parameter of more elements gets no memory: its "
        "constructors are recorded and replayed on its shard, with random numbers that do not "
        "depend on the number of ranks; smaller ones are built as in torch"},
    Key{"strata.init.report", kText, "null", "", kHonoured,
        "file to which rank 0 writes the start-up report as JSON; null: none"},
    Key{"strata.timeout_s", kNumber, "300.0", "> 0", kHonoured,
        "seconds after which a rank that waits for another raises an error"},
    Key{"strata.decay_unused", kFlag, "false", "", kHonoured,
        "true: update a parameter without a gradient on any rank, as DeepSpeed does: it decays and "
        "its momentum goes on; false: it keeps its value, as in torch"},
    Key{"strata.max_skipped_steps", kInteger, "20", "0..1000000", kHonoured,
        "consecutive steps that may be skipped because gradients were not finite (fp32 and bf16); "
        "the next one raises NumericsError; 0: the first one does"},
    Key{"strata.trace", kText, "null", "", kHonoured,
        "file to which rank 0 writes a timeline of some steps of all ranks for ui.perfetto.dev; "
        "null: none"},
    Key{"strata.placement", kRules, "[]", "", kHonoured,
        "rules for single parameters; the first matching rule applies: `match`, a pattern of "
        "names, or `larger_than`, bytes (\"200MB\"), or both; `param` and `optimizer`, the tier of "
        "its weights and optimizer states: \"device\", \"host\", \"nvme\"; folders and staging are "
        "those of offload_param and offload_optimizer. \"auto\": the engine fills the device "
        "first, then the host, then the drive of an nvme_path, with the least used state last"},
    Key{"strata.device_budget", kBytes, "null", "> 0", kHonoured,
        "bytes that the engine may hold on its device when placement is \"auto\", without "
        "activations; null or \"auto\": two thirds of the free memory at the start; no bound on "
        "CPU ranks, so nothing is offloaded"},
    Key{"strata.host_budget", kBytes, "null", "> 0", kHonoured,
        "bytes of host memory that a rank may use for offloaded state and staging; null or "
        "\"auto\": its share of three quarters of the available memory at the start"},
    Key{"strata.verify_drives", kFlag, "false", "", kHonoured,
        "keep a checksum of each page written to a drive under offload (8 bytes for 4 KiB), and "
        "compare it when the page is read; a difference is an error"},
    Key{"strata.tiles", kSection, "{}", "", kHonoured,
        "parameters that are gathered, used and reduced in tiles of rows (stage 3)"},
    Key{"strata.tiles.max_gather", kBytes, "null", "> 0", kHonoured,
        "upper bound on gathered bytes of one parameter; a larger one is cut into tiles. null or "
        "\"auto\": tiles of 256 MiB for parameters that take more than half of the free memory of "
        "the fullest GPU, where a tiling rule exists; none on CPU ranks"},
    Key{"strata.tiles.match", kStrings, "[]", "", kHonoured,
        "patterns of names: only parameters that match one are cut; []: all"},
    Key{"strata.trace_steps", kInteger, "3", "1..100", kHonoured,
        "steps in the timeline, after two warm-up steps"},
};

}  // namespace

std::span<const Key> zero_keys() {
  return kZeroKeys;
}

std::span<const Key> offload_keys() {
  return kOffloadKeys;
}

std::span<const Key> strata_keys() {
  return kStrataKeys;
}

}  // namespace strata::engine
