// Rows of zero_optimization.offload_param, zero_optimization.offload_optimizer and aio.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define PARAM "zero_optimization.offload_param."
#define OPTIM "zero_optimization.offload_optimizer."
#define NOT_OFFLOADED "nothing is offloaded by this version"

constexpr std::array kOffloadKeys{
    Key{"zero_optimization.offload_param", kSection, "{}", "", kHint,
        "where sharded parameters live", NOT_OFFLOADED},
    Key{PARAM "device", kChoice, "\"none\"", "none|cpu|nvme", kRefused,
        "parameters that live on the host or a drive",
        "write \"none\" or remove offload_param; stage 3 over more ranks needs less device memory"},
    Key{PARAM "nvme_path", kText, "null", "", kHint, "folder on the drive", NOT_OFFLOADED},
    Key{PARAM "buffer_count", kInteger, "5", ">= 0", kHint, "staging buffers", NOT_OFFLOADED},
    Key{PARAM "buffer_size", kNumel, "100000000", ">= 0", kHint, "elements of a staging buffer",
        NOT_OFFLOADED},
    Key{PARAM "max_in_cpu", kNumel, "1000000000", ">= 0", kHint, "elements kept on the host",
        NOT_OFFLOADED},
    Key{PARAM "pin_memory", kFlag, "true", "", kHint, "page-locked staging", NOT_OFFLOADED},

    Key{"zero_optimization.offload_optimizer", kSection, "{}", "", kHint,
        "where optimizer state lives", NOT_OFFLOADED},
    Key{OPTIM "device", kChoice, "\"none\"", "none|cpu|nvme", kRefused,
        "optimizer state that lives on the host or a drive",
        "write \"none\" or remove offload_optimizer; stages 1 to 3 shard that state over the "
        "ranks"},
    Key{OPTIM "nvme_path", kText, "null", "", kHint, "folder on the drive", NOT_OFFLOADED},
    Key{OPTIM "buffer_count", kInteger, "4", ">= 0", kHint, "staging buffers", NOT_OFFLOADED},
    Key{OPTIM "buffer_size", kNumel, "100000000", ">= 0", kHint, "elements of a staging buffer",
        NOT_OFFLOADED},
    Key{OPTIM "pin_memory", kFlag, "true", "", kHint, "page-locked staging", NOT_OFFLOADED},
    Key{OPTIM "pipeline_read", kFlag, "false", "", kHint, "read ahead of the step", NOT_OFFLOADED},
    Key{OPTIM "pipeline_write", kFlag, "false", "", kHint, "write behind the step", NOT_OFFLOADED},
    Key{OPTIM "fast_init", kFlag, "false", "", kHint, "write the first state quickly",
        NOT_OFFLOADED},
    Key{OPTIM "ratio", kNumber, "1.0", "0..1", kHint, "share of the state that is offloaded",
        NOT_OFFLOADED},
    Key{OPTIM "super_offload", kFlag, "false", "", kRefused, "superchip offload",
        "write false or remove the key"},
    Key{OPTIM "cpuadam_cores_perc", kNumber, "0.8", "0..1", kHint,
        "share of cores for the host step",
        NOT_OFFLOADED "; strata.threads sets the threads of host kernels"},

    Key{"aio", kSection, "{}", "", kHint, "reads and writes of offloaded state", NOT_OFFLOADED},
    Key{"aio.block_size", kBytes, "1048576", "> 0", kHint, "bytes of one request", NOT_OFFLOADED},
    Key{"aio.queue_depth", kInteger, "8", "> 0", kHint, "requests in flight", NOT_OFFLOADED},
    Key{"aio.intra_op_parallelism", kInteger, "1", "> 0", kHint, "threads of one transfer",
        NOT_OFFLOADED},
    Key{"aio.single_submit", kFlag, "false", "", kHint, "one request a submission", NOT_OFFLOADED},
    Key{"aio.overlap_events", kFlag, "true", "", kHint, "submit while completions arrive",
        NOT_OFFLOADED},
    Key{"aio.use_gds", kFlag, "false", "", kHint, "drive to GPU without the host", NOT_OFFLOADED},
};

#undef PARAM
#undef OPTIM
#undef NOT_OFFLOADED

}  // namespace

std::span<const Key> offload_keys() {
  return kOffloadKeys;
}

}  // namespace strata::engine
