// Rows of bf16, fp16, torch_autocast and data_types.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define NO_SCALE "the loss needs no scale in bfloat16, and inputs are the model's own"

constexpr std::array kPrecisionKeys{
    Key{"bf16", kSection, "{}", "", kHonoured,
        "parameters in bfloat16, master weights in fp32; without bf16 and fp16 each "
        "parameter keeps its own dtype, with fp32 masters",
        ""},
    Key{"bf16.enabled", kFlag, "false", "", kHonoured, "turns bf16 on", ""},
    Key{"bf16.check_grad_overflow", kFlag, "true", "", kHonoured,
        "skip the step of every rank when a gradient is not finite", ""},
    Key{"bf16.immediate_grad_update", kFlag, "false", "", kHint,
        "accumulate a gradient as soon as it appears", "it always is"},
    Key{"bf16.bf16_master_weights_and_grads", kFlag, "false", "", kHonoured,
        "weights are updated in fp32 and rounded to bfloat16 at each step, so small "
        "updates are lost; gradients accumulate in bfloat16 unless "
        "data_types.grad_accum_dtype names another type; for Adam and AdamW",
        ""},
    Key{"bf16.bf16_optimizer_states", kFlag, "false", "", kHonoured,
        "Adam's moments in bfloat16; needs bf16_master_weights_and_grads", ""},
    Key{"bf16.auto_cast", kFlag, "false", "", kHint,
        "a key of fp16, in files that copy its section", NO_SCALE},
    Key{"bf16.loss_scale", kNumber, "0.0", ">= 0", kHint, "likewise", NO_SCALE},
    Key{"bf16.initial_scale_power", kInteger, "16", "", kHint, "likewise", NO_SCALE},
    Key{"bf16.loss_scale_window", kInteger, "1000", "", kHint, "likewise", NO_SCALE},
    Key{"bf16.hysteresis", kInteger, "2", "", kHint, "likewise", NO_SCALE},
    Key{"bf16.min_loss_scale", kInteger, "1", "", kHint, "likewise", NO_SCALE},

    Key{"fp16", kSection, "{}", "", kHonoured, "parameters in float16, loss scaled", ""},
    Key{"fp16.enabled", kFlag, "false", "", kHonoured, "turns fp16 on", ""},
    Key{"fp16.auto_cast", kFlag, "false", "", kHonoured, "cast floating inputs of forward to fp16",
        ""},
    Key{"fp16.loss_scale", kNumber, "0.0", ">= 0", kHonoured,
        "factor of the loss; 0: the engine adapts it (dynamic)", ""},
    Key{"fp16.initial_scale_power", kInteger, "16", "0..64", kHonoured,
        "the dynamic scale starts at 2 to this power", ""},
    Key{"fp16.loss_scale_window", kInteger, "1000", "", kHonoured,
        "steps without overflow after which the scale doubles; > 0 when dynamic", ""},
    Key{"fp16.hysteresis", kInteger, "2", ">= 1", kHonoured, "overflows before the scale halves",
        ""},
    Key{"fp16.consecutive_hysteresis", kFlag, "false", "", kHonoured,
        "count only overflows in a row", ""},
    Key{"fp16.min_loss_scale", kInteger, "1", "", kHonoured,
        "the scale never falls below; > 0 when dynamic", ""},
    Key{"fp16.opt_level", kText, "null", "", kHint, "level of NVIDIA apex, as old files have it",
        "parameters are float16, with fp32 masters"},
    Key{"fp16.fp16_scale_tolerance", kNumber, "0.0", ">= 0", kHint,
        "share of overflows that does not lower the scale, as old files have it",
        "hysteresis counts them"},
    Key{"fp16.fp16_master_weights_and_grads", kFlag, "false", "", kRefused,
        "master weights in float16", "remove the key: master weights are fp32"},

    Key{"torch_autocast", kSection, "{}", "", kHonoured,
        "forward within torch.autocast; parameters keep their types", ""},
    Key{"torch_autocast.enabled", kFlag, "false", "", kHonoured, "turns it on", ""},
    Key{"torch_autocast.dtype", kChoice, "null",
        "bf16|fp16|bfloat16|float16|half|torch.bfloat16|torch.float16", kHonoured,
        "type in which operations compute that autocast finds safe; fp16 scales the loss, from "
        "65536 on",
        ""},
    Key{"torch_autocast.lower_precision_safe_modules", kStrings, "null", "", kHint,
        "classes of modules whose weights and gradients may travel in that type",
        "they travel in the parameter's type; communication_data_type names a type for "
        "all gradients"},

    Key{"data_types", kSection, "{}", "", kHonoured, "element types", ""},
    Key{"data_types.grad_accum_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kHonoured, "type in which gradients accumulate; null: fp32", ""},
    Key{"data_types.param_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kRefused, "type of parameters apart from bf16 and fp16",
        "remove the key and set bf16.enabled or fp16.enabled"},
    Key{"data_types.buffer_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kRefused, "type of buffers apart from the model's own",
        "remove the key and cast the buffers on the model: buffers keep their type"},
    Key{"data_types.keep_in_fp32_modules", kStrings, "null", "", kRefused,
        "buffers kept in fp32 by name", "remove the key: buffers keep their type"},
};

#undef NO_SCALE

}  // namespace

std::span<const Key> precision_keys() {
  return kPrecisionKeys;
}

}  // namespace strata::engine
