// Rows of batch sizes, gradients, optimizer, scheduler, data loader and precision.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

constexpr std::array kTrainingKeys{
    Key{"train_batch_size", kInteger, "null", "1..2147483647", kHonoured,
        "samples of one step over all ranks = micro-batch x accumulation x world size; any two "
        "give the third"},
    Key{"train_micro_batch_size_per_gpu", kInteger, "null", "1..2147483647", kHonoured,
        "samples of one forward on one rank"},
    Key{"gradient_accumulation_steps", kInteger, "null", "1..2147483647", kHonoured,
        "forward and backward passes of one step"},
    Key{"managed_gradient_accumulation", kFlag, "true", "", kHonoured,
        "false: every step() updates the weights, after any number of passes; losses are still "
        "divided by gradient_accumulation_steps"},
    Key{"gradient_clipping", kNumber, "1.0", ">= 0", kHonoured,
        "largest global L2 norm of the gradient; 0 does not clip"},
    Key{"gradient_allreduce_op", kWord, "\"mean\"", "mean|sum", kHonoured,
        "the reduction over ranks: mean or sum"},
    Key{"communication_data_type", kWord, "null", "fp32|fp16|bf16", kHonoured,
        "element type in which gradients travel; null: fp32"},
    Key{"steps_per_print", kCount, "null", "> 0", kHonoured,
        "steps between two lines of progress; null or Infinity: none"},
    Key{"dataloader_drop_last", kFlag, "false", "", kHonoured,
        "drop the last incomplete batch of training_data"},

    Key{"optimizer", kSection, "{}", "", kHonoured, "the optimizer that initialize builds"},
    Key{"optimizer.type", kText, "null", "", kHonoured,
        "Adam, AdamW, Lion, or an elementwise class of torch.optim"},
    Key{"optimizer.params", kParams, "{}", "", kHonoured, "parameters of the optimizer"},
    Key{"optimizer.legacy_fusion", kFlag, "false", "", kHint, "fused fp16 optimizer of old",
        "Adam is always one fused pass"},
    Key{"scheduler", kSection, "{}", "", kHonoured, "the schedule of learning rates"},
    Key{"scheduler.type", kText, "null", "", kHonoured,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest; or, in Python, a class "
        "of torch.optim.lr_scheduler that needs no functions, other schedulers or metrics"},
    Key{"scheduler.params", kParams, "{}", "", kHonoured, "parameters of the scheduler"},

    Key{"prescale_gradients", kFlag, "false", "", kHint, "divide before the reduction",
        "the reduction divides in fp32"},
    Key{"gradient_predivide_factor", kNumber, "1.0", "> 0", kHint, "divide in two parts",
        "the reduction divides in fp32"},
    Key{"seq_parallel_communication_data_type", kWord, "\"fp32\"", "fp32|fp16|bf16", kHint,
        "element type between sequence-parallel ranks", "sequence parallelism is not offered"},
    Key{"disable_allgather", kFlag, "false", "", kHint, "debugging of gathers",
        "parameters are always gathered after the step"},
    Key{"disable_python_gc", kFlag, "false", "", kHint, "stop Python's garbage collector",
        "the engine leaves the collector alone"},
    Key{"zero_allow_untested_optimizer", kFlag, "false", "", kHint, "allow optimizers of one's own",
        "every elementwise torch.optim optimizer is allowed"},
    Key{"zero_force_ds_cpu_optimizer", kFlag, "true", "", kHint,
        "insist on the host optimizer under offload",
        "the engine's own Adam updates offloaded states, on the GPU where there is one"},
    Key{"vocabulary_size", kInteger, "null", "", kHint, "size of the vocabulary",
        "it was only ever checked for alignment"},
    Key{"sparse_gradients", kFlag, "false", "", kHint,
        "reduce sparse gradients of embeddings as such",
        "sparse gradients are made dense, and so reduced"},
};

#define PARAM "optimizer.params."

constexpr std::array kAdam{
    Key{PARAM "lr", kNumber, "0.001", ">= 0", kHonoured, "learning rate"},
    Key{PARAM "betas", kNumbers, "[0.9,0.999]", "2 of 0..1", kHonoured, "decay of the two moments"},
    Key{PARAM "eps", kNumber, "1e-8", ">= 0", kHonoured, "added to the denominator"},
    Key{PARAM "weight_decay", kNumber, "0.0", ">= 0", kHonoured, "weight decay"},
    Key{PARAM "adam_w_mode", kFlag, "true", "", kHonoured,
        "decoupled weight decay; \"Adam\" has it too unless this is false"},
    Key{PARAM "torch_adam", kFlag, "false", "", kHonoured,
        "make torch.optim's class; the engine's kernel computes its update, except with amsgrad, "
        "maximize or capturable"},
    Key{PARAM "bias_correction", kFlag, "true", "", kHonoured,
        "false: Adam uses the moments uncorrected from the first step on"},
    Key{PARAM "amsgrad", kFlag, "false", "", kRefused, "the AMSGrad variant",
        "add \"torch_adam\": true, which offers it"},
    Key{PARAM "maximize", kFlag, "false", "", kRefused, "ascent instead of descent",
        "add \"torch_adam\": true, which offers it"},
    Key{PARAM "fp32_optimizer_states", kFlag, "true", "", kRefused, "optimizer state in 16 bits",
        "write true or remove the key: optimizer state is fp32"},
    Key{PARAM "foreach", kFlag, "null", "", kHint, "torch's multi-tensor loop",
        "Adam is one pass over the shard"},
    Key{PARAM "fused", kFlag, "null", "", kHint, "torch's fused kernel",
        "Adam is one pass over the shard"},
    Key{PARAM "capturable", kFlag, "false", "", kHint, "safe to capture in a CUDA graph",
        "it concerns torch's own kernels"},
    Key{PARAM "differentiable", kFlag, "false", "", kHint, "autograd through the step",
        "the step runs outside autograd"},
    Key{PARAM "set_grad_none", kFlag, "true", "", kHint, "free gradients in zero_grad",
        "gradients live in the engine's own buffers"},
};

#undef PARAM

#define PARAM "scheduler.params."

constexpr Key kWarmupType =
    Key{PARAM "warmup_type", kChoice, "\"log\"", "log|linear", kHonoured, "shape of the warm-up"};
constexpr Key kWarmupSteps = Key{PARAM "warmup_num_steps",
                                 kInteger,
                                 "1000",
                                 "> 0",
                                 kHonoured,
                                 "steps of the warm-up; fewer than 2 count as 2"};
constexpr Key kLastIteration = Key{PARAM "last_batch_iteration",
                                   kInteger,
                                   "-1",
                                   ">= -1",
                                   kHonoured,
                                   "step to start after; -1: from the beginning"};

constexpr std::array kWarmup{
    Key{PARAM "warmup_min_lr", kPerGroup, "0.0", ">= 0", kHonoured, "rate at the start"},
    Key{PARAM "warmup_max_lr", kPerGroup, "null", ">= 0", kHonoured,
        "rate after the warm-up; null: the optimizer's"},
    kWarmupSteps,
    kWarmupType,
    kLastIteration,
};

constexpr std::array kDecay{
    Key{PARAM "total_num_steps", kInteger, "null", ">= 0", kHonoured,
        "steps of the whole training; required"},
    Key{PARAM "warmup_min_lr", kPerGroup, "0.0", ">= 0", kHonoured, "rate at the start"},
    Key{PARAM "warmup_max_lr", kPerGroup, "0.001", ">= 0", kHonoured, "rate after the warm-up"},
    kWarmupSteps,
    kWarmupType,
    kLastIteration,
};

constexpr std::array kCosine{
    Key{PARAM "total_num_steps", kInteger, "null", ">= 0", kHonoured,
        "steps of the whole training; required"},
    Key{PARAM "warmup_min_ratio", kNumber, "0.0", ">= 0", kHonoured,
        "share of the optimizer's rate at the start"},
    kWarmupSteps,
    Key{PARAM "cos_min_ratio", kNumber, "0.0001", ">= 0", kHonoured,
        "share of the optimizer's rate at the end"},
    kWarmupType,
    kLastIteration,
};

constexpr std::array kOneCycle{
    Key{PARAM "cycle_min_lr", kPerGroup, "null", ">= 0", kHonoured, "lowest rate; required"},
    Key{PARAM "cycle_max_lr", kPerGroup, "null", ">= 0", kHonoured, "highest rate; required"},
    Key{PARAM "decay_lr_rate", kNumber, "0.0", "", kHonoured, "decay after the cycle"},
    Key{PARAM "cycle_first_step_size", kNumber, "2000.0", "> 0", kHonoured, "steps of the rise"},
    Key{PARAM "cycle_second_step_size", kNumber, "null", ">= 0", kHonoured,
        "steps of the fall; null: as the rise"},
    Key{PARAM "cycle_first_stair_count", kInteger, "0", ">= 0", kHonoured,
        "stairs of the rise; 0: smooth"},
    Key{PARAM "cycle_second_stair_count", kInteger, "null", ">= 0", kHonoured,
        "stairs of the fall; null: as the rise"},
    Key{PARAM "decay_step_size", kNumber, "0.0", ">= 0", kHonoured,
        "steps of one decay; 0: no decay"},
    Key{PARAM "cycle_momentum", kFlag, "true", "", kHonoured,
        "cycle beta1 against the rate (beta2 becomes 0.99)"},
    Key{PARAM "cycle_min_mom", kPerGroup, "0.8", "", kHonoured, "lowest beta1"},
    Key{PARAM "cycle_max_mom", kPerGroup, "0.9", "", kHonoured, "highest beta1"},
    Key{PARAM "decay_mom_rate", kNumber, "0.0", "", kHonoured, "growth of beta1 after the cycle"},
    kLastIteration,
};

constexpr std::array kRangeTest{
    Key{PARAM "lr_range_test_min_lr", kPerGroup, "0.001", ">= 0", kHonoured, "first rate"},
    Key{PARAM "lr_range_test_step_size", kInteger, "2000", "> 0", kHonoured,
        "steps of one interval"},
    Key{PARAM "lr_range_test_step_rate", kNumber, "1.0", "", kHonoured,
        "growth of one interval, in first rates"},
    Key{PARAM "lr_range_test_staircase", kFlag, "false", "", kHonoured,
        "grow at the end of an interval only"},
    kLastIteration,
};

#undef PARAM

constexpr std::array<std::string_view, 5> kTypes{"WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
                                                 "OneCycle", "LRRangeTest"};

constexpr std::string_view kNoScale =
    "the loss needs no scale in bfloat16, and inputs are the model's own";

constexpr std::array kPrecisionKeys{
    Key{"bf16", kSection, "{}", "", kHonoured,
        "parameters in bfloat16, master weights in fp32; without bf16 and fp16 each parameter "
        "keeps its own dtype, with fp32 masters"},
    Key{"bf16.enabled", kFlag, "false", "", kHonoured, "turns bf16 on"},
    Key{"bf16.check_grad_overflow", kFlag, "true", "", kHonoured,
        "skip the step of every rank when a gradient is not finite"},
    Key{"bf16.immediate_grad_update", kFlag, "false", "", kHint,
        "accumulate a gradient as soon as it appears", "it always is"},
    Key{"bf16.bf16_master_weights_and_grads", kFlag, "false", "", kHonoured,
        "weights are updated in fp32 and rounded to bfloat16 at each step, so small updates are "
        "lost; gradients accumulate in bfloat16 unless data_types.grad_accum_dtype names another "
        "type; for Adam and AdamW"},
    Key{"bf16.bf16_optimizer_states", kFlag, "false", "", kHonoured,
        "Adam's moments in bfloat16; needs bf16_master_weights_and_grads"},
    Key{"bf16.auto_cast", kFlag, "false", "", kHint,
        "a key of fp16, in files that copy its section", kNoScale},
    Key{"bf16.loss_scale", kNumber, "0.0", ">= 0", kHint, "likewise", kNoScale},
    Key{"bf16.initial_scale_power", kInteger, "16", "", kHint, "likewise", kNoScale},
    Key{"bf16.loss_scale_window", kInteger, "1000", "", kHint, "likewise", kNoScale},
    Key{"bf16.hysteresis", kInteger, "2", "", kHint, "likewise", kNoScale},
    Key{"bf16.min_loss_scale", kInteger, "1", "", kHint, "likewise", kNoScale},

    Key{"fp16", kSection, "{}", "", kHonoured, "parameters in float16, loss scaled"},
    Key{"fp16.enabled", kFlag, "false", "", kHonoured, "turns fp16 on"},
    Key{"fp16.auto_cast", kFlag, "false", "", kHonoured, "cast floating inputs of forward to fp16"},
    Key{"fp16.loss_scale", kNumber, "0.0", ">= 0", kHonoured,
        "factor of the loss; 0: the engine adapts it (dynamic)"},
    Key{"fp16.initial_scale_power", kInteger, "16", "0..64", kHonoured,
        "the dynamic scale starts at 2 to this power"},
    Key{"fp16.loss_scale_window", kInteger, "1000", "", kHonoured,
        "steps without overflow after which the scale doubles; > 0 when dynamic"},
    Key{"fp16.hysteresis", kInteger, "2", ">= 1", kHonoured, "overflows before the scale halves"},
    Key{"fp16.consecutive_hysteresis", kFlag, "false", "", kHonoured,
        "count only overflows in a row"},
    Key{"fp16.min_loss_scale", kInteger, "1", "", kHonoured,
        "the scale never falls below; > 0 when dynamic"},
    Key{"fp16.opt_level", kText, "null", "", kHint, "level of NVIDIA apex, as old files have it",
        "parameters are float16, with fp32 masters"},
    Key{"fp16.fp16_scale_tolerance", kNumber, "0.0", ">= 0", kHint,
        "share of overflows that does not lower the scale, as old files have it",
        "hysteresis counts them"},
    Key{"fp16.fp16_master_weights_and_grads", kFlag, "false", "", kRefused,
        "master weights in float16", "remove the key: master weights are fp32"},

    Key{"torch_autocast", kSection, "{}", "", kHonoured,
        "forward within torch.autocast; parameters keep their types"},
    Key{"torch_autocast.enabled", kFlag, "false", "", kHonoured, "turns it on"},
    Key{"torch_autocast.dtype", kChoice, "null",
        "bf16|fp16|bfloat16|float16|half|torch.bfloat16|torch.float16", kHonoured,
        "type in which operations compute that autocast finds safe; fp16 scales the loss, from "
        "65536 on"},
    Key{"torch_autocast.lower_precision_safe_modules", kStrings, "null", "", kHint,
        "classes of modules whose weights and gradients may travel in that type",
        "they travel in the parameter's type; communication_data_type names a type for all "
        "gradients"},

    Key{"data_types", kSection, "{}", "", kHonoured, "element types"},
    Key{"data_types.grad_accum_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kHonoured, "type in which gradients accumulate; null: fp32"},
    Key{"data_types.param_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kRefused, "type of parameters apart from bf16 and fp16",
        "remove the key and set bf16.enabled or fp16.enabled"},
    Key{"data_types.buffer_dtype", kChoice, "null", "fp32|bf16|fp16|float32|bfloat16|float16",
        kRefused, "type of buffers apart from the model's own",
        "remove the key and cast the buffers on the model: buffers keep their type"},
    Key{"data_types.keep_in_fp32_modules", kStrings, "null", "", kRefused,
        "buffers kept in fp32 by name", "remove the key: buffers keep their type"},
};

}  // namespace

std::span<const Key> training_keys() {
  return kTrainingKeys;
}
std::span<const Key> adam_keys() {
  return kAdam;
}

std::span<const std::string_view> scheduler_types() {
  return kTypes;
}

std::span<const Key> scheduler_keys(std::string_view type) {
  if (type == "WarmupLR") return kWarmup;
  if (type == "WarmupDecayLR") return kDecay;
  if (type == "WarmupCosineLR") return kCosine;
  if (type == "OneCycle") return kOneCycle;
  if (type == "LRRangeTest") return kRangeTest;
  return {};
}

std::span<const Key> precision_keys() {
  return kPrecisionKeys;
}

}  // namespace strata::engine
