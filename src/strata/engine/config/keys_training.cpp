// The tables of batch sizes, gradients, optimizer, scheduler, sharding, offload and precision.
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
.type text | Adam, AdamW, Lion; AdamW8bit, Adam8bit, Lion8bit, whose states have 8 bits; Muon; or an
    elementwise class of torch.optim
.params params | parameters of the optimizer
.legacy_fusion flag = false, hint | fused fp16 optimizer of old | Adam is always one fused pass
scheduler section | the schedule of learning rates
.type text | WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest; or, in Python, a
    class of torch.optim.lr_scheduler that needs no functions, other schedulers or metrics
.params params | parameters of the scheduler
prescale_gradients flag = false, hint | divide before the reduction | the reduction divides in fp32
gradient_predivide_factor number(> 0) = 1.0, hint | divide in two parts
seq_parallel_communication_data_type word(fp32|fp16|bf16) = "fp32", hint | element type between
    sequence-parallel ranks | gradients travel in communication_data_type
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
    key: optimizer state is fp32, or has 8 bits (strata.optimizer_states)
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

# Sharding
zero_optimization section | the ZeRO stage, its buckets and its offload
.stage integer(0..3) = 0 | 0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and
    parameters
.reduce_bucket_size numel(>= 0) = 500000000 | upper bound on gradient elements under reduction, at
    least one block; 0: one block after the other
.overlap_comm flag | false: step() returns when new weights are complete (see strata.refresh_at);
    reductions overlap with backward in any case
.stage3_prefetch_bucket_size numel(>= 0) = 50000000 | elements that are gathered before their use;
    the next unit is always prefetched, unless this is 0
.stage3_param_persistence_threshold numel(>= 0) = 0 | parameters of at most this many elements stay
    gathered; DeepSpeed's default is 100000, because it gathers each parameter alone; Strata gathers
    small ones with their unit
.stage3_model_persistence_threshold numel(>= 0) = 9223372036854775807 | upper bound on the elements
    that stay gathered
.stage3_max_live_parameters numel(>= 0) | upper bound on gathered elements, excluding units in use
    and the next unit (unless stage3_prefetch_bucket_size is 0); modules outside blocks share a unit
    only up to it; null: 1e9, or stage3_prefetch_bucket_size with stage3_allgather_sequential
.stage3_max_reuse_distance numel(>= 0) | release a gathered parameter whose next use is more than
    this many elements away, even if more may be live; null: stage3_max_live_parameters alone
    decides
.stage3_allgather_sequential flag = false | gather one parameter at a time, while the module that
    owns it runs (small parameters share a unit); needs less memory and more gathers
.stage3_partition_stream_chunk_size bytes(> 0) = 8388608 | bytes of one chunk, in which zero.Init
    computes and initialize copies a parameter
.stage3_gather_16bit_weights_on_model_save flag = false | allow a framework to gather the whole
    weights when it saves
.enable_sanity_checks flag = false | true: an edit within GatheredParameters(modifier_rank=None) is
    an error in the stand-in, too; strata.zero always makes it one
.ignore_unused_parameters flag = true | whether a trainable parameter may get no gradient in a step
.leaf_module section | modules that are gathered as one and never split: by class, by name, by the
    end of the name
..classes strings = ["transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"] | by class
..names strings = [] | by module name
..name_suffixes strings = [] | by the end of the module name
.mics_shard_size integer(>= -1) = -1 | size of a shard group (MiCS), at stage 3: weights, gradients
    and optimizer states are sharded over this many consecutive ranks, and each group holds all of
    them; must divide the number of ranks; -1 or 0: one group of all ranks
.zero_hpz_partition_size integer(>= 0) = 1 | size of a group for secondary shards (ZeRO++), at stage
    3: each group of this many consecutive ranks holds all weights, so gathers stay inside it;
    gradients and optimizer states are sharded over all ranks; must divide the number of ranks; 0 or
    1: no groups
.mics_hierarchical_params_gather flag = false, hint | two-level gathers within sub-groups (MiCS) | a
    gather inside a shard group is one copy from each of its ranks
.contiguous_gradients flag = true, hint | copy gradients into a contiguous bucket | gradients always
    land in their unit's flat buffer
.reduce_scatter flag = true, hint | reduce-scatter rather than all-reduce | every stage reduces by
    reduce-scatter
.use_multi_rank_bucket_allreduce flag = true, hint | all-reduce a bucket and let its owners copy
.allgather_partitions flag = true, hint | all-gather rather than broadcasts after the step |
    parameters are always all-gathered
.allgather_bucket_size numel(>= 0) = 500000000, hint | elements a gather after the step | a gather
    takes one unit; strata.unit_size bounds it
.compute_grad_norm flag = true, hint | compute the global gradient norm | norm and overflow check
    are one pass that always runs
.parameter_alignment flag = false, hint | align parameters in the flat buffer | parameters are
    always aligned to 256 bytes
.load_from_fp32_weights flag = true, hint | restore master weights from a checkpoint's fp32 copy |
    loading restores masters wherever there are some; load_module_only loads values alone
.elastic_checkpoint flag = false, hint | old elastic checkpoint layout | a checkpoint loads at any
    number of ranks and any stage
.sub_group_size numel(>= 0) = 1000000000, hint | elements of one optimizer sub-group | the optimizer
    steps unit by unit
.stage3_module_granularity_threshold numel = 0, hint | gather modules below this granularity as one
    | units are found by block; see strata.wrap
.stage3_use_all_reduce_for_fetch_params flag = false, hint | gather by all-reduce | gathers write in
    place into the flat buffer
.round_robin_gradients flag = false, hint | interleave ownership of gradients | every rank owns an
    equal slice of every unit
.memory_efficient_linear flag = true, hint | gather the weight of a Linear again in backward |
    autograd's views stay valid across release and gather
.pipeline_loading_checkpoint flag = false, hint | load a checkpoint rank after rank | every rank
    reads its own byte ranges only
.override_module_apply flag = true, hint | gather in Module.apply | a released parameter that is
    read anywhere is gathered on the spot
.log_trace_cache_warnings flag = false, missed | warn when the fetch order changes | a changed order
    costs a late gather, nothing else
.save_muon_momentum_buffer_in_memory flag = false, hint | keep Muon's momentum off the drive | the
    momentum rests where offload_optimizer says
.legacy_stage1 flag = false, refused | the first implementation of stage 1 | write "stage": 1 alone
.zenflow switch, refused | asynchronous updates of ZenFlow | remove the section
.zero_quantized_weights flag = false, refused | gathers of quantised weights (ZeRO++) | write false
    or remove the key
.zero_quantized_nontrainable_weights flag = false, refused | gathers of quantised frozen weights
    (ZeRO++)
.zero_quantized_gradients flag = false, refused | reductions of quantised gradients (ZeRO++) |
    remove the key; "communication_data_type": "bf16" halves the bytes
.zeropp_loco_param params, hint | error feedback of quantised gradients (LoCo) | it is for
    zero_quantized_gradients, which is not offered

# Offload
zero_optimization.offload_param section | where sharded weights rest between uses
.device choice(none|cpu|nvme) = "none" | the tier of this rank's weight shards at stage 3, except
    persistent ones: "cpu" (pinned host memory) or "nvme" (a drive)
.nvme_path texts | an existing folder on the drive, or one on each of several drives, which share
    the bytes by their measured speeds; each rank makes its own folder in it
.buffer_count integer(>= 0) = 5 | buffer_count x buffer_size elements of the parameters' dtype is
    the staging memory for drives; parameters of any size share it
.buffer_size numel(>= 0) = 100000000 | see buffer_count
.max_in_cpu numel(>= 0) = 0 | elements added to this memory; parameters that fit stay in it and are
    not read again; DeepSpeed's default is 1e9
.pin_memory flag = true, hint | page-locked memory | memory of offloaded parameters is locked where
    a GPU reads it, and nowhere else
zero_optimization.offload_optimizer section | where optimizer states rest between steps
.device choice(none|cpu|nvme) = "none" | the tier of optimizer states, masters and reduced
    gradients: "cpu" (pinned host memory) or "nvme" (a drive, with gradients on the host)
.nvme_path texts | an existing folder on the drive, or one on each of several drives, which share
    the bytes by their measured speeds; each rank makes its own folder in it
.buffer_count integer(>= 0) = 4 | buffer_count x buffer_size fp32 elements is the staging memory for
    drives; tensors of any size share it
.buffer_size numel(>= 0) = 100000000 | see buffer_count
.pin_memory flag = false, hint | page-locked memory | memory of offloaded states is locked where a
    GPU works on it, and nowhere else
.pipeline_read flag = false, hint | read ahead of the step | states on a drive are always read ahead
.pipeline_write flag = false, hint | write behind the step | states on a drive are always written
    behind the step
.fast_init flag = false, hint | write the first state quickly | states that are zero are not written
    at the start
.ratio number(0..1) = 1.0 | share of the elements whose state is offloaded; the state of the first
    parameters stays on the device
.super_offload flag = false, hint | superchip offload | the device and the host's cores always update
    side by side, beside the next forward and with the same bits
.cpuadam_cores_perc number(0..1) = 0.8, hint | share of cores for the host step | strata.threads
    sets the threads of host kernels
aio section | how drives are read and written; `strata bench-io` measures good values for a drive
.block_size bytes(> 0) = 1048576 | bytes of one request, rounded up to 4 KiB; at most 1 GiB
.queue_depth integer(> 0) = 32 | requests under way at once for each intra_op_parallelism; at most
    4096 in all, and 64 where threads serve drives because the kernel refuses io_uring
.intra_op_parallelism integer(> 0) = 1 | see queue_depth
.single_submit flag = false, hint | one request a submission | requests that wait are handed over
    together
.overlap_events flag = true, hint | submit while completions arrive | completions are always taken
    as they come
.use_gds flag = false, hint | drive to GPU without the host | drives are read and written through
    pinned memory of the host

# Precision
bf16 section | parameters in bfloat16, master weights in fp32; without bf16 and fp16 each parameter
    keeps its own dtype, with fp32 masters
.enabled flag = false | turns bf16 on
.check_grad_overflow flag = true | skip the step of every rank when a gradient is not finite
.immediate_grad_update flag = false, hint | accumulate a gradient as soon as it appears | it always
    is
.bf16_master_weights_and_grads flag = false | weights are updated in fp32 and rounded to bfloat16 at
    each step, so small updates are lost; gradients accumulate in bfloat16 unless
    data_types.grad_accum_dtype names another type; for Adam and AdamW
.bf16_optimizer_states flag = false | Adam's moments in bfloat16; needs
    bf16_master_weights_and_grads
.auto_cast flag = false, hint | a key of fp16, in files that copy its section | the loss needs no
    scale in bfloat16, and inputs are the model's own
.loss_scale number(>= 0) = 0.0, hint | likewise
.initial_scale_power integer = 16, hint | likewise
.loss_scale_window integer = 1000, hint | likewise
.hysteresis integer = 2, hint | likewise
.min_loss_scale integer = 1, hint | likewise
fp16 section | parameters in float16, loss scaled
.enabled flag = false | turns fp16 on
.auto_cast flag = false | cast floating inputs of forward to fp16
.loss_scale number(>= 0) = 0.0 | factor of the loss; 0: the engine adapts it (dynamic)
.initial_scale_power integer(0..64) = 16 | the dynamic scale starts at 2 to this power
.loss_scale_window integer = 1000 | steps without overflow after which the scale doubles; > 0 when
    dynamic
.hysteresis integer(>= 1) = 2 | overflows before the scale halves
.consecutive_hysteresis flag = false | count only overflows in a row
.min_loss_scale integer = 1 | the scale never falls below; > 0 when dynamic
.opt_level text, hint | level of NVIDIA apex, as old files have it | parameters are float16, with
    fp32 masters
.fp16_scale_tolerance number(>= 0) = 0.0, hint | share of overflows that does not lower the scale,
    as old files have it | hysteresis counts them
.fp16_master_weights_and_grads flag = false, refused | master weights in float16 | remove the key:
    master weights are fp32
torch_autocast section | forward within torch.autocast; parameters keep their types
.enabled flag = false | turns it on
.dtype choice(bf16|fp16|bfloat16|float16|half|torch.bfloat16|torch.float16) | type in which
    operations compute that autocast finds safe; fp16 scales the loss, from 65536 on
.lower_precision_safe_modules strings, hint | classes of modules whose weights and gradients may
    travel in that type | they travel in the parameter's type; communication_data_type names a type
    for all gradients
data_types section | element types
.grad_accum_dtype choice(fp32|bf16|fp16|float32|bfloat16|float16) | type in which gradients
    accumulate; null: fp32
.param_dtype choice(fp32|bf16|fp16|float32|bfloat16|float16), refused | type of parameters apart
    from bf16 and fp16 | remove the key and set bf16.enabled or fp16.enabled
.buffer_dtype choice(fp32|bf16|fp16|float32|bfloat16|float16), refused | type of buffers apart from
    the model's own | remove the key and cast the buffers on the model: buffers keep their type
.keep_in_fp32_modules strings, refused | buffers kept in fp32 by name | remove the key: buffers keep
    their type
)";

}  // namespace strata::engine
