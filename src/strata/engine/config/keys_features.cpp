// Rows of DeepSpeed's features that Strata does not have: accepted while they are off.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define REMOVE "remove the section"
#define BY_CALL "nothing is compiled until the script calls engine.compile(backend=...)"
#define OF_DEEP "it is for DeepCompile, which is not offered"

constexpr std::array kFeaturesKeys{
    Key{"amp", kSwitch, "null", "enabled", kRefused, "mixed precision of NVIDIA apex",
        "remove the section and write \"bf16\": {\"enabled\": true}"},
    Key{"compile", kSection, "{}", "", kHint, "compilation of the model", BY_CALL},
    Key{"compile.deepcompile", kFlag, "false", "", kRefused, "DeepCompile",
        "write false or remove the key, and call engine.compile()"},
    Key{"compile.enabled", kFlag, "true", "", kHint, "whether the model may be compiled", BY_CALL},
    Key{"compile.disable", kFlag, "false", "", kHint, "or may not", BY_CALL},
    Key{"compile.backend", kText, "\"inductor\"", "", kHint, "which compiler", BY_CALL},
    Key{"compile.kwargs", kParams, "{}", "", kHint, "its arguments", BY_CALL},
    Key{"compile.autoep_non_moe", kFlag, "false", "", kHint, "the modules that are not experts",
        OF_DEEP},
    Key{"compile.passes", kStrings, "null", "", kHint, "which passes", OF_DEEP},
    Key{"compile.free_activation", kFlag, "false", "", kHint, "free activations early", OF_DEEP},
    Key{"compile.free_activation_threshold", kBytes, "10485760", ">= 0", kHint, "from which size",
        OF_DEEP},
    Key{"compile.offload_activation", kFlag, "false", "", kHint, "activations to the host",
        OF_DEEP},
    Key{"compile.offload_activation_pin_memory", kFlag, "true", "", kHint, "to pinned memory",
        OF_DEEP},
    Key{"compile.offload_opt_states", kFlag, "false", "", kHint, "states to the host", OF_DEEP},
    Key{"compile.offload_parameters", kFlag, "false", "", kHint, "weights to the host", OF_DEEP},
    Key{"compile.double_buffer", kFlag, "true", "", kHint, "two buffers", OF_DEEP},
    Key{"compile.symmetric_memory", kFlag, "false", "", kHint, "memory that peers map", OF_DEEP},
    Key{"compile.debug_log", kFlag, "false", "", kHint, "print graphs", OF_DEEP},
    Key{"compile.sync_before_reduce", kFlag, "false", "", kHint, "wait there", OF_DEEP},
    Key{"compile.sync_after_reduce", kFlag, "false", "", kHint, "wait there", OF_DEEP},
    Key{"compile.sync_before_allgather", kFlag, "false", "", kHint, "wait there", OF_DEEP},
    Key{"compile.sync_after_allgather", kFlag, "false", "", kHint, "wait there", OF_DEEP},
    Key{"compile.keep_int_input_tensors", kFlag, "true", "", kHint, "inputs that are kept",
        OF_DEEP},
    Key{"compile.keep_all_input_tensors", kFlag, "false", "", kHint, "inputs that are kept",
        OF_DEEP},
    Key{"elasticity", kSwitch, "null", "enabled", kRefused,
        "batch sizes that follow the world size", "remove the section and set train_batch_size"},
    Key{"tensor_parallel", kSwitch, "null",
        "enabled|autotp_size|tp_size|tp.tp_size|tensor_parallel.tp_size", kRefused,
        "tensor parallelism", REMOVE},
    Key{"expert_parallel", kSwitch, "null", "enabled", kRefused, "expert parallelism", REMOVE},
    Key{"pipeline", kSwitch, "null", "enabled|stages|pipeline_parallel_size", kRefused,
        "pipeline parallelism", REMOVE},
    Key{"sequence_parallel_size", kInteger, "1", ">= 1", kRefused, "sequence parallelism",
        "write 1 or remove the key"},
    Key{"data_parallel_size", kInteger, "null", ">= 1", kRefused,
        "a data-parallel size apart from the world size",
        "remove the key: every rank is a data-parallel rank"},
    Key{"use_data_before_expert_parallelism", kFlag, "false", "", kRefused,
        "order of expert-parallel ranks", "write false or remove the key"},
    Key{"curriculum_learning", kSwitch, "null", "enabled", kRefused, "curriculum learning", REMOVE},
    Key{"data_efficiency", kSwitch, "null",
        "data_sampling.curriculum_learning|data_sampling.dynamic_batching|data_routing.random_ltd",
        kRefused, "data sampling and routing", REMOVE},
    Key{"progressive_layer_drop", kSwitch, "null", "enabled", kRefused, "dropping of layers",
        REMOVE},
    Key{"eigenvalue", kSwitch, "null", "enabled", kRefused, "eigenvalues of blocks", REMOVE},
    Key{"compression_training", kSwitch, "null",
        "layer_reduction|weight_quantization.shared_parameters|"
        "activation_quantization.shared_parameters|sparse_pruning.shared_parameters|"
        "row_pruning.shared_parameters|head_pruning.shared_parameters|"
        "channel_pruning.shared_parameters",
        kRefused, "compression while training", REMOVE},
    Key{"quantize_training", kSwitch, "null", "enabled", kRefused, "quantisation while training",
        REMOVE},
    Key{"weight_quantization", kSwitch, "null", "enabled", kRefused, "quantised weights", REMOVE},
    Key{"hybrid_engine", kSwitch, "null", "enabled", kRefused,
        "one engine for training and generation", REMOVE},
    Key{"nebula", kSwitch, "null", "enabled", kRefused, "Nebula checkpoints", REMOVE},
    Key{"datastates", kSwitch, "null", "enabled", kRefused, "DataStates checkpoints", REMOVE},
    Key{"autotuning", kSwitch, "null", "enabled", kRefused, "search for settings",
        "remove the section: the engine sizes its own buffers"},
    Key{"graph_harvesting", kFlag, "false", "", kRefused, "CUDA graphs of the step",
        "write false or remove the key"},
    Key{"sparse_attention", kSwitch, "null", "enabled", kRefused, "block-sparse attention",
        "remove the section: attention is the model's own"},
};

#undef REMOVE
#undef BY_CALL
#undef OF_DEEP

}  // namespace

std::span<const Key> feature_keys() {
  return kFeaturesKeys;
}

}  // namespace strata::engine
