// The tables of batch sizes, gradients, optimizer and scheduler.
#include "strata/engine/config/key.h"

namespace strata::engine {

const std::string_view kTrainingTables = R"(
# Batch, gradients, optimizer, scheduler
train_batch_size integer(1..2147483647) | samples of one step over all ranks = micro-batch x
    accumulation x world size; any two give the third
train_micro_batch_size_per_gpu integer(1..2147483647) | samples of one forward on one rank
gradient_accumulation_steps integer(1..2147483647) | forward and backward passes of one step
managed_gradient_accumulation flag = true | false: every step() updates the weights, after any
    number of passes; losses are still divided by gradient_accumulation_steps
gradient_clipping number(>= 0) = 1.0 | largest global L2 norm of the gradient; 0 does not clip
gradient_allreduce_op word(mean|sum) = "mean" | the reduction over ranks: mean or sum
communication_data_type word(fp32|fp16|bf16) | element type in which gradients travel; null: fp32
steps_per_print count(> 0) | steps between two lines of progress; null or Infinity: none
dataloader_drop_last flag = false | drop the last incomplete batch of training_data
optimizer section | the optimizer that initialize builds
.type text | Adam, AdamW, Lion, or an elementwise class of torch.optim
.params params | parameters of the optimizer
.legacy_fusion flag = false, hint | fused fp16 optimizer of old | Adam is always one fused pass
scheduler section | the schedule of learning rates
.type text | WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest; or, in Python, a
    class of torch.optim.lr_scheduler that needs no functions, other schedulers or metrics
.params params | parameters of the scheduler
prescale_gradients flag = false, hint | divide before the reduction | the reduction divides in fp32
gradient_predivide_factor number(> 0) = 1.0, hint | divide in two parts
seq_parallel_communication_data_type word(fp32|fp16|bf16) = "fp32", hint | element type between
    sequence-parallel ranks | sequence parallelism is not offered
disable_allgather flag = false, hint | debugging of gathers | parameters are always gathered after
    the step
disable_python_gc flag = false, hint | stop Python's garbage collector | the engine leaves the
    collector alone
zero_allow_untested_optimizer flag = false, hint | allow optimizers of one's own | every elementwise
    torch.optim optimizer is allowed
zero_force_ds_cpu_optimizer flag = true, hint | insist on the host optimizer under offload | the
    engine's own Adam updates offloaded states, on the GPU where there is one
vocabulary_size integer, hint | size of the vocabulary | it was only ever checked for alignment
sparse_gradients flag = false, hint | reduce sparse gradients of embeddings as such | sparse
    gradients are made dense, and so reduced

# optimizer.params of Adam and AdamW
optimizer.params
.lr number(>= 0) = 0.001 | learning rate
.betas numbers(2 of 0..1) = [0.9,0.999] | decay of the two moments
.eps number(>= 0) = 1e-8 | added to the denominator
.weight_decay number(>= 0) = 0.0 | weight decay
.adam_w_mode flag = true | decoupled weight decay; "Adam" has it too unless this is false
.torch_adam flag = false | make torch.optim's class; the engine's kernel computes its update, except
    with amsgrad, maximize or capturable
.bias_correction flag = true | false: Adam uses the moments uncorrected from the first step on
.amsgrad flag = false, refused | the AMSGrad variant | add "torch_adam": true, which offers it
.maximize flag = false, refused | ascent instead of descent
.fp32_optimizer_states flag = true, refused | optimizer state in 16 bits | write true or remove the
    key: optimizer state is fp32
.foreach flag, hint | torch's multi-tensor loop | Adam is one pass over the shard
.fused flag, hint | torch's fused kernel
.capturable flag = false, hint | safe to capture in a CUDA graph | it concerns torch's own kernels
.differentiable flag = false, hint | autograd through the step | the step runs outside autograd
.set_grad_none flag = true, hint | free gradients in zero_grad | gradients live in the engine's own
    buffers

# scheduler.params of WarmupLR
scheduler.params
.warmup_min_lr per_group(>= 0) = 0.0 | rate at the start
.warmup_max_lr per_group(>= 0) | rate after the warm-up; null: the optimizer's
.warmup_num_steps integer(> 0) = 1000 | steps of the warm-up; fewer than 2 count as 2
.warmup_type choice(log|linear) = "log" | shape of the warm-up
.last_batch_iteration integer(>= -1) = -1 | step to start after; -1: from the beginning

# scheduler.params of WarmupDecayLR
scheduler.params
.total_num_steps integer(>= 0) | steps of the whole training; required
.warmup_min_lr per_group(>= 0) = 0.0 | rate at the start
.warmup_max_lr per_group(>= 0) = 0.001 | rate after the warm-up
.warmup_num_steps integer(> 0) = 1000 | steps of the warm-up; fewer than 2 count as 2
.warmup_type choice(log|linear) = "log" | shape of the warm-up
.last_batch_iteration integer(>= -1) = -1 | step to start after; -1: from the beginning

# scheduler.params of WarmupCosineLR
scheduler.params
.total_num_steps integer(>= 0) | steps of the whole training; required
.warmup_min_ratio number(>= 0) = 0.0 | share of the optimizer's rate at the start
.warmup_num_steps integer(> 0) = 1000 | steps of the warm-up; fewer than 2 count as 2
.cos_min_ratio number(>= 0) = 0.0001 | share of the optimizer's rate at the end
.warmup_type choice(log|linear) = "log" | shape of the warm-up
.last_batch_iteration integer(>= -1) = -1 | step to start after; -1: from the beginning

# scheduler.params of OneCycle
scheduler.params
.cycle_min_lr per_group(>= 0) | lowest rate; required
.cycle_max_lr per_group(>= 0) | highest rate; required
.decay_lr_rate number = 0.0 | decay after the cycle
.cycle_first_step_size number(> 0) = 2000.0 | steps of the rise
.cycle_second_step_size number(>= 0) | steps of the fall; null: as the rise
.cycle_first_stair_count integer(>= 0) = 0 | stairs of the rise; 0: smooth
.cycle_second_stair_count integer(>= 0) | stairs of the fall; null: as the rise
.decay_step_size number(>= 0) = 0.0 | steps of one decay; 0: no decay
.cycle_momentum flag = true | cycle beta1 against the rate (beta2 becomes 0.99)
.cycle_min_mom per_group = 0.8 | lowest beta1
.cycle_max_mom per_group = 0.9 | highest beta1
.decay_mom_rate number = 0.0 | growth of beta1 after the cycle
.last_batch_iteration integer(>= -1) = -1 | step to start after; -1: from the beginning

# scheduler.params of LRRangeTest
scheduler.params
.lr_range_test_min_lr per_group(>= 0) = 0.001 | first rate
.lr_range_test_step_size integer(> 0) = 2000 | steps of one interval
.lr_range_test_step_rate number = 1.0 | growth of one interval, in first rates
.lr_range_test_staircase flag = false | grow at the end of an interval only
.last_batch_iteration integer(>= -1) = -1 | step to start after; -1: from the beginning
)";

}  // namespace strata::engine
