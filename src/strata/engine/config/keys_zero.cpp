// Rows of zero_optimization.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define ZERO "zero_optimization."

constexpr std::array kZeroKeys{
    Key{"zero_optimization", kSection, "{}", "", kHonoured,
        "the ZeRO stage, its buckets and its offload", ""},
    Key{ZERO "stage", kInteger, "0", "0..3", kHonoured,
        "0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and parameters", ""},
    Key{ZERO "reduce_bucket_size", kNumel, "500000000", ">= 0", kHonoured,
        "upper bound on gradient elements under reduction, at least one block; 0: one "
        "block after the other",
        ""},
    Key{ZERO "overlap_comm", kFlag, "null", "", kHonoured,
        "false: step() returns when new weights are complete (see strata.refresh_at); "
        "reductions overlap with backward in any case",
        ""},
    Key{ZERO "stage3_prefetch_bucket_size", kNumel, "50000000", ">= 0", kHonoured,
        "elements that are gathered before their use; the next unit is always prefetched, "
        "unless this is 0",
        ""},
    Key{ZERO "stage3_param_persistence_threshold", kNumel, "0", ">= 0", kHonoured,
        "parameters of at most this many elements stay gathered; DeepSpeed's default is "
        "100000, because it gathers each parameter alone; Strata gathers small ones with "
        "their unit",
        ""},
    Key{ZERO "stage3_model_persistence_threshold", kNumel, "9223372036854775807", ">= 0", kHonoured,
        "upper bound on the elements that stay gathered", ""},
    Key{ZERO "stage3_max_live_parameters", kNumel, "null", ">= 0", kHonoured,
        "upper bound on gathered elements, excluding units in use and the next unit "
        "(unless stage3_prefetch_bucket_size is 0); modules outside blocks share a unit "
        "only up to it; null: 1e9, or stage3_prefetch_bucket_size with "
        "stage3_allgather_sequential",
        ""},
    Key{ZERO "stage3_max_reuse_distance", kNumel, "null", ">= 0", kHonoured,
        "release a gathered parameter whose next use is more than this many elements "
        "away, even if more may be live; null: stage3_max_live_parameters alone decides",
        ""},
    Key{ZERO "stage3_allgather_sequential", kFlag, "false", "", kHonoured,
        "gather one parameter at a time, while the module that owns it runs (small "
        "parameters share a unit); needs less memory and more gathers",
        ""},
    Key{ZERO "stage3_partition_stream_chunk_size", kBytes, "8388608", "> 0", kHonoured,
        "bytes of one chunk, in which zero.Init computes and initialize copies a "
        "parameter",
        ""},
    Key{ZERO "stage3_gather_16bit_weights_on_model_save", kFlag, "false", "", kHonoured,
        "allow a framework to gather the whole weights when it saves", ""},
    Key{ZERO "enable_sanity_checks", kFlag, "false", "", kHonoured,
        "true: an edit within GatheredParameters(modifier_rank=None) is an error in the "
        "stand-in, too; strata.zero always makes it one",
        ""},
    Key{ZERO "ignore_unused_parameters", kFlag, "true", "", kHonoured,
        "whether a trainable parameter may get no gradient in a step", ""},
    Key{ZERO "leaf_module", kSection, "{}", "", kHonoured,
        "modules that are gathered as one and never split: by class, by name, by the end "
        "of the name",
        ""},
    Key{ZERO "leaf_module.classes", kStrings,
        R"(["transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",)"
        R"("transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",)"
        R"("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"])",
        "", kHonoured, "by class", ""},
    Key{ZERO "leaf_module.names", kStrings, "[]", "", kHonoured, "by module name", ""},
    Key{ZERO "leaf_module.name_suffixes", kStrings, "[]", "", kHonoured,
        "by the end of the module name", ""},

    Key{ZERO "mics_shard_size", kInteger, "-1", ">= -1", kHonoured,
        "size of a shard group (MiCS), at stage 3: weights, gradients and optimizer "
        "states are sharded over this many consecutive ranks, and each group holds all of "
        "them; must divide the number of ranks; -1 or 0: one group of all ranks",
        ""},
    Key{ZERO "zero_hpz_partition_size", kInteger, "1", ">= 0", kHonoured,
        "size of a group for secondary shards (ZeRO++), at stage 3: each group of this "
        "many consecutive ranks holds all weights, so gathers stay inside it; gradients "
        "and optimizer states are sharded over all ranks; must divide the number of "
        "ranks; 0 or 1: no groups",
        ""},

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

}  // namespace

std::span<const Key> zero_keys() {
  return kZeroKeys;
}

}  // namespace strata::engine
