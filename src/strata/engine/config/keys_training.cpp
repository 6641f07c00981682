// Rows of batch sizes, gradients, optimizer, scheduler and data loader.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

constexpr std::array kTrainingKeys{
    Key{"train_batch_size", kInteger, "null", "1..2147483647", kHonoured,
        "samples of one step over all ranks = micro-batch x accumulation x world size; any two "
        "give the third",
        ""},
    Key{"train_micro_batch_size_per_gpu", kInteger, "null", "1..2147483647", kHonoured,
        "samples of one forward on one rank", ""},
    Key{"gradient_accumulation_steps", kInteger, "null", "1..2147483647", kHonoured,
        "forward and backward passes of one step", ""},
    Key{"managed_gradient_accumulation", kFlag, "true", "", kHonoured,
        "false: every step() updates the weights, after any number of passes; losses are "
        "still divided by gradient_accumulation_steps",
        ""},
    Key{"gradient_clipping", kNumber, "1.0", ">= 0", kHonoured,
        "largest global L2 norm of the gradient; 0 does not clip", ""},
    Key{"gradient_allreduce_op", kWord, "\"mean\"", "mean|sum", kHonoured,
        "the reduction over ranks: mean or sum", ""},
    Key{"communication_data_type", kWord, "null", "fp32|fp16|bf16", kHonoured,
        "element type in which gradients travel; null: fp32", ""},
    Key{"steps_per_print", kCount, "null", "> 0", kHonoured,
        "steps between two lines of progress; null or Infinity: none", ""},
    Key{"dataloader_drop_last", kFlag, "false", "", kHonoured,
        "drop the last incomplete batch of training_data", ""},

    Key{"optimizer", kSection, "{}", "", kHonoured, "the optimizer that initialize builds", ""},
    Key{"optimizer.type", kText, "null", "", kHonoured,
        "Adam, AdamW, Lion, or an elementwise class of torch.optim", ""},
    Key{"optimizer.params", kParams, "{}", "", kHonoured, "parameters of the optimizer", ""},
    Key{"optimizer.legacy_fusion", kFlag, "false", "", kHint, "fused fp16 optimizer of old",
        "Adam is always one fused pass"},
    Key{"scheduler", kSection, "{}", "", kHonoured, "the schedule of learning rates", ""},
    Key{"scheduler.type", kText, "null", "", kHonoured,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest; or, in Python, a class "
        "of torch.optim.lr_scheduler that needs no functions, other schedulers or metrics",
        ""},
    Key{"scheduler.params", kParams, "{}", "", kHonoured, "parameters of the scheduler", ""},

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
    Key{PARAM "lr", kNumber, "0.001", ">= 0", kHonoured, "learning rate", ""},
    Key{PARAM "betas", kNumbers, "[0.9,0.999]", "2 of 0..1", kHonoured, "decay of the two moments",
        ""},
    Key{PARAM "eps", kNumber, "1e-8", ">= 0", kHonoured, "added to the denominator", ""},
    Key{PARAM "weight_decay", kNumber, "0.0", ">= 0", kHonoured, "weight decay", ""},
    Key{PARAM "adam_w_mode", kFlag, "true", "", kHonoured,
        "decoupled weight decay; \"Adam\" has it too unless this is false", ""},
    Key{PARAM "torch_adam", kFlag, "false", "", kHonoured,
        "make torch.optim's class; the engine's kernel computes its update, except with "
        "amsgrad, maximize or capturable",
        ""},
    Key{PARAM "bias_correction", kFlag, "true", "", kHonoured,
        "false: Adam uses the moments uncorrected from the first step on", ""},
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

}  // namespace

std::span<const Key> training_keys() {
  return kTrainingKeys;
}
std::span<const Key> adam_keys() {
  return kAdam;
}

}  // namespace strata::engine
