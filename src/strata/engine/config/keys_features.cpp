// Rows of DeepSpeed's features that Strata does not have: accepted while they are off.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define REMOVE "remove the section"

constexpr std::array kFeaturesKeys{
    Key{"amp", kSwitch, "null", "enabled", kRefused, "mixed precision of NVIDIA apex",
        "remove the section and write \"bf16\": {\"enabled\": true}"},
    Key{"compile", kSwitch, "null", "enabled|deepcompile", kRefused, "DeepCompile",
        "remove the section and use torch.compile on the model"},
    Key{"elasticity", kSwitch, "null", "enabled", kRefused,
        "batch sizes that follow the world size", "remove the section and set train_batch_size"},
    Key{"tensor_parallel", kSwitch, "null", "enabled|autotp_size", kRefused, "tensor parallelism",
        REMOVE},
    Key{"expert_parallel", kSwitch, "null", "enabled", kRefused, "expert parallelism", REMOVE},
    Key{"pipeline", kSwitch, "null", "enabled", kRefused, "pipeline parallelism", REMOVE},
    Key{"sequence_parallel_size", kInteger, "1", ">= 1", kRefused, "sequence parallelism",
        "write 1 or remove the key"},
    Key{"data_parallel_size", kInteger, "null", ">= 1", kRefused,
        "a data-parallel size apart from the world size",
        "remove the key: every rank is a data-parallel rank"},
    Key{"use_data_before_expert_parallelism", kFlag, "false", "", kRefused,
        "order of expert-parallel ranks", "write false or remove the key"},
    Key{"curriculum_learning", kSwitch, "null", "enabled", kRefused, "curriculum learning", REMOVE},
    Key{"data_efficiency", kSwitch, "null", "enabled", kRefused, "data sampling and routing",
        REMOVE},
    Key{"progressive_layer_drop", kSwitch, "null", "enabled", kRefused, "dropping of layers",
        REMOVE},
    Key{"eigenvalue", kSwitch, "null", "enabled", kRefused, "eigenvalues of blocks", REMOVE},
    Key{"compression_training", kSwitch, "null", "enabled", kRefused, "compression while training",
        REMOVE},
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

}  // namespace

std::span<const Key> feature_keys() {
  return kFeaturesKeys;
}

}  // namespace strata::engine
