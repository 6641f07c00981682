// Rows of zero_optimization.offload_param, zero_optimization.offload_optimizer and aio.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define PARAM "zero_optimization.offload_param."
#define OPTIM "zero_optimization.offload_optimizer."

constexpr std::array kOffloadKeys{
    Key{"zero_optimization.offload_param", kSection, "{}", "", kHonoured,
        "where sharded weights rest between uses", ""},
    Key{PARAM "device", kChoice, "\"none\"", "none|cpu|nvme", kHonoured,
        "the tier of this rank's weight shards at stage 3, except persistent ones: "
        "\"cpu\" (pinned host memory) or \"nvme\" (a drive)",
        ""},
    Key{PARAM "nvme_path", kTexts, "null", "", kHonoured,
        "an existing folder on the drive, or one on each of several drives, which share "
        "the bytes by their measured speeds; each rank makes its own folder in it",
        ""},
    Key{PARAM "buffer_count", kInteger, "5", ">= 0", kHonoured,
        "buffer_count x buffer_size elements of the parameters' dtype is the staging "
        "memory for drives; parameters of any size share it",
        ""},
    Key{PARAM "buffer_size", kNumel, "100000000", ">= 0", kHonoured, "see buffer_count", ""},
    Key{PARAM "max_in_cpu", kNumel, "0", ">= 0", kHonoured,
        "elements added to this memory; parameters that fit stay in it and are not read "
        "again; DeepSpeed's default is 1e9",
        ""},
    Key{PARAM "pin_memory", kFlag, "true", "", kHint, "page-locked memory",
        "memory of offloaded parameters is locked where a GPU reads it, and nowhere else"},

    Key{"zero_optimization.offload_optimizer", kSection, "{}", "", kHonoured,
        "where optimizer states rest between steps", ""},
    Key{OPTIM "device", kChoice, "\"none\"", "none|cpu|nvme", kHonoured,
        "the tier of optimizer states, masters and reduced gradients: \"cpu\" (pinned "
        "host memory) or \"nvme\" (a drive, with gradients on the host)",
        ""},
    Key{OPTIM "nvme_path", kTexts, "null", "", kHonoured,
        "an existing folder on the drive, or one on each of several drives, which share "
        "the bytes by their measured speeds; each rank makes its own folder in it",
        ""},
    Key{OPTIM "buffer_count", kInteger, "4", ">= 0", kHonoured,
        "buffer_count x buffer_size fp32 elements is the staging memory for drives; "
        "tensors of any size share it",
        ""},
    Key{OPTIM "buffer_size", kNumel, "100000000", ">= 0", kHonoured, "see buffer_count", ""},
    Key{OPTIM "pin_memory", kFlag, "false", "", kHint, "page-locked memory",
        "memory of offloaded states is locked where a GPU works on it, and nowhere else"},
    Key{OPTIM "pipeline_read", kFlag, "false", "", kHint, "read ahead of the step",
        "states on a drive are always read ahead"},
    Key{OPTIM "pipeline_write", kFlag, "false", "", kHint, "write behind the step",
        "states on a drive are always written behind the step"},
    Key{OPTIM "fast_init", kFlag, "false", "", kHint, "write the first state quickly",
        "states that are zero are not written at the start"},
    Key{OPTIM "ratio", kNumber, "1.0", "0..1", kHonoured,
        "share of the elements whose state is offloaded; the state of the first "
        "parameters stays on the device",
        ""},
    Key{OPTIM "super_offload", kFlag, "false", "", kRefused, "superchip offload",
        "write false or remove the key"},
    Key{OPTIM "cpuadam_cores_perc", kNumber, "0.8", "0..1", kHint,
        "share of cores for the host step", "strata.threads sets the threads of host kernels"},

    Key{"aio", kSection, "{}", "", kHonoured,
        "how drives are read and written; `strata bench-io` measures good values for a "
        "drive",
        ""},
    Key{"aio.block_size", kBytes, "1048576", "> 0", kHonoured,
        "bytes of one request, rounded up to 4 KiB; at most 1 GiB", ""},
    Key{"aio.queue_depth", kInteger, "32", "> 0", kHonoured,
        "requests under way at once for each intra_op_parallelism; at most 4096 in all, and 64 "
        "where threads serve drives because the kernel refuses io_uring",
        ""},
    Key{"aio.intra_op_parallelism", kInteger, "1", "> 0", kHonoured, "see queue_depth", ""},
    Key{"aio.single_submit", kFlag, "false", "", kHint, "one request a submission",
        "requests that wait are handed over together"},
    Key{"aio.overlap_events", kFlag, "true", "", kHint, "submit while completions arrive",
        "completions are always taken as they come"},
    Key{"aio.use_gds", kFlag, "false", "", kHint, "drive to GPU without the host",
        "drives are read and written through pinned memory of the host"},
};

#undef PARAM
#undef OPTIM

}  // namespace

std::span<const Key> offload_keys() {
  return kOffloadKeys;
}

}  // namespace strata::engine
