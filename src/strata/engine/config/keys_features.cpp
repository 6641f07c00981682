// The tables of checkpoints, diagnostics and Strata's own section, and of DeepSpeed's features that
// Strata does not have, which are accepted while they are off.
#include "strata/engine/config/key.h"

namespace strata::engine {

const std::string_view kFeatureTables = R"(
# Checkpoints and diagnostics
checkpoint section | checkpoints of training
.async flag = false | save_checkpoint copies the shards to the host and returns; a thread writes
    them during the next steps
.keep integer(>= 0) = 0 | number of checkpoints that stay in a folder; a new one removes the oldest;
    0: all
.tag_validation word(Warn|Ignore|Fail) = "Warn", hint | what to do when ranks name different tags |
    it is always an error, on every rank
.load_universal flag = false, hint | load the universal layout | every checkpoint loads at any world
    size and stage
.use_node_local_storage flag = false, hint | every node has its own disk | all ranks must see the
    checkpoint's folder
.checkpoint_serialization flag = true, hint | serialise while writing | shards are written through a
    ring of buffers, all ranks at once
.parallel_write section, hint | who writes
..pipeline_stage flag = false, hint | pipeline stages write in parallel
.writer section, hint | how it is written
..type text = "FAST", hint | writer
..io_buffer_size bytes(> 0) = 67108864, hint | staging bytes
..io_buffer_double flag = true, hint | two staging buffers
..io_multiplier integer(> 0) = 1, hint | files written at a time
..show_statistics flag = false, missed | print speeds
..data_parallel text, hint | who shares the writing
..decoupled flag = false, hint | write in the background
activation_checkpointing section, hint | deepspeed.checkpointing | activation checkpointing is
    torch.utils.checkpoint's or the model's own
.partition_activations flag = false, missed | shard saved activations
.contiguous_memory_optimization flag = false, missed | copy them into one buffer
.cpu_checkpointing flag = false | another name of "cpu" as strata.activations.device
.number_checkpoints integer(>= 0), hint | how many
.synchronize_checkpoint_boundary flag = false, hint | synchronise at each
.profile flag = false, missed | time them
wall_clock_breakdown flag = false, shown | a line a step with the times of forward, backward and
    update, by the device's clock
memory_breakdown flag = false, shown | a line a step with the memory in use and at its peak
dump_state flag = false, shown | list every setting at the start
log_level word(debug|info|warning|error|critical), shown | level of the logger "strata"; the
    environment's STRATA_LOG_LEVEL takes precedence
timers section, shown | how fast training is
.throughput section, shown | at each steps_per_print
..enabled flag = true, shown | a line with samples and tokens a second; with floating-point
    operations, too, if this key is in the configuration: they are counted in the second step
..synchronized flag = true, hint | wait for the device | speeds are means over many steps, and no
    step waits
flops_profiler section, shown | a table of operations by module
.enabled flag = false, shown | whether it is made
.recompute_fwd_factor number(>= 0) = 0.0, hint | recomputed share | what backward computes again is
    counted
.profile_step integer = 1, shown | steps before the one that is counted
.module_depth integer = -1, shown | how deep the table goes; -1: to the last module
.top_modules integer = 1, shown | how many classes of modules are listed at each depth
.detailed flag = true, shown | a row for every module
.output_file text, shown | a file to write the table to, in place of the log
comms_logger section, shown | gathers and reductions
.enabled flag = false, shown | time them; deepspeed.comm.log_summary() and engine.step_report() show
    the times
.verbose flag = false, shown | a line a step with them
.prof_all flag = true, hint | all of them | all are timed together
.debug flag = false, missed | with the caller | transfers belong to units and not to calls;
    strata.trace shows each with its unit
.prof_ops strings = [], hint | which of them | all are timed together
tensorboard section, shown | metrics to TensorBoard, by rank 0
.enabled flag = false, shown | whether they are written
.output_path text = "", shown | folder
.job_name text = "DeepSpeedJobName", shown | folder within it
wandb section, shown | metrics to Weights & Biases, by rank 0
.enabled flag = false, shown | whether they are written
.group text, shown | group of the run
.team text, shown | entity of the run
.project text = "deepspeed", shown | project of the run
csv_monitor section, shown | metrics to CSV files, by rank 0
.enabled flag = false, shown | whether they are written
.output_path text = "", shown | folder
.job_name text = "DeepSpeedJobName", shown | folder within it
comet section, shown | metrics to Comet, by rank 0
.enabled flag = false, shown | whether they are written
.samples_log_interval integer = 100, shown | samples between two values of one metric
.project text, shown | project
.workspace text, shown | workspace
.api_key text, shown | key
.experiment_name text, shown | name of the experiment
.experiment_key text, shown | key of the experiment
.online flag, shown | false: kept on this host
.mode text, shown | get, create or get_or_create

# Features that are not offered
amp switch(enabled), refused | mixed precision of NVIDIA apex | remove the section and write "bf16":
    {"enabled": true}
compile section, hint | compilation of the model | nothing is compiled until the script calls
    engine.compile(backend=...)
.deepcompile flag = false, refused | DeepCompile | write false or remove the key, and call
    engine.compile()
.enabled flag = true, hint | whether the model may be compiled | nothing is compiled until the
    script calls engine.compile(backend=...)
.disable flag = false, hint | or may not
.backend text = "inductor", hint | which compiler
.kwargs params, hint | its arguments
.autoep_non_moe flag = false, hint | the modules that are not experts | it is for DeepCompile, which
    is not offered
.passes strings, hint | which passes
.free_activation flag = false, hint | free activations early
.free_activation_threshold bytes(>= 0) = 10485760, hint | from which size
.offload_activation flag = false, hint | activations to the host
.offload_activation_pin_memory flag = true, hint | to pinned memory
.offload_opt_states flag = false, hint | states to the host
.offload_parameters flag = false, hint | weights to the host
.double_buffer flag = true, hint | two buffers
.symmetric_memory flag = false, hint | memory that peers map
.debug_log flag = false, hint | print graphs
.sync_before_reduce flag = false, hint | wait there
.sync_after_reduce flag = false, hint | wait there
.sync_before_allgather flag = false, hint | wait there
.sync_after_allgather flag = false, hint | wait there
.keep_int_input_tensors flag = true, hint | inputs that are kept
.keep_all_input_tensors flag = false, hint | inputs that are kept
elasticity switch(enabled), refused | batch sizes that follow the world size | remove the section
    and set train_batch_size
tensor_parallel switch(enabled| autotp_size| tp_size| tp.tp_size| tensor_parallel.tp_size), refused
    | tensor parallelism | remove the section
expert_parallel switch(enabled), refused | expert parallelism
pipeline switch(enabled| stages| pipeline_parallel_size), refused | pipeline parallelism
sequence_parallel_size integer(>= 0) = 1 | another name of strata.sequence_parallel.size; 0: 1
data_parallel_size integer(>= 1), refused | a data-parallel size apart from the world size | remove
    the key: every rank is a data-parallel rank
use_data_before_expert_parallelism flag = false, refused | order of expert-parallel ranks | write
    false or remove the key
curriculum_learning switch(enabled), refused | curriculum learning | remove the section
data_efficiency switch(data_sampling.curriculum_learning| data_sampling.dynamic_batching|
    data_routing.random_ltd), refused | data sampling and routing
progressive_layer_drop switch(enabled), refused | dropping of layers
eigenvalue switch(enabled), refused | eigenvalues of blocks
compression_training switch(layer_reduction| weight_quantization.shared_parameters|
    activation_quantization.shared_parameters| sparse_pruning.shared_parameters|
    row_pruning.shared_parameters| head_pruning.shared_parameters|
    channel_pruning.shared_parameters), refused | compression while training
quantize_training switch(enabled), refused | quantisation while training
weight_quantization switch(enabled), refused | quantised weights
hybrid_engine switch(enabled), refused | one engine for training and generation
nebula switch(enabled), refused | Nebula checkpoints
datastates switch(enabled), refused | DataStates checkpoints
autotuning switch(enabled), refused | search for settings | remove the section: the engine sizes its
    own buffers
graph_harvesting flag = false, refused | CUDA graphs of the step | write false or remove the key
sparse_attention switch(enabled), refused | block-sparse attention | remove the section: attention
    is the model's own

# Strata's own section
strata section | Strata's own settings
.reduce_at choice(micro_step|boundary) = "micro_step" | when gradients are reduced: after every
    backward, or once a step (keeps whole gradients)
.refresh_at choice(auto|step|forward) = "auto" | when whole weights are all-gathered after an update
    (stages 0 to 2): in step(), or lazily, beside the next forward; a read of a parameter waits for
    it; auto: forward on GPUs, unless overlap_comm is false
.update choice(auto|device|host) = "auto" | where the model trains on a GPU, and weights and states
    rest in host memory: the processors that update them: the GPU (device), the rank's cores (host),
    or both, each by its speed in the last steps (auto); the results have the same bits
.optimizer_states word(32bit|8bit) | states of Adam, AdamW and Lion: "8bit" keeps them as codes of 8
    bits with a scale for each 256 elements, of parameters with at least min_8bit_size elements and
    of no embedding; null: "32bit", or what the optimizer's name says
.min_8bit_size integer(>= 0) = 4096 | parameters with fewer elements have states in 32 bits
.keep_small_moments flag = true | a second moment in 8 bits that is positive never becomes zero;
    false: it may, as in bitsandbytes
.update_at choice(step|backward) = "step" | when weights are updated: in step(), or in the
    engine.backward() that ends a step, each unit when its gradients are complete (backward): the
    bits are the same, but nothing may clip, skip or change the update, so it needs
    gradient_clipping 0, check_grad_overflow false under bf16, no fp16, Adam or AdamW, and one
    backward() and the rates of then for each step
.state_cache bytes(>= 0) | bytes of a GPU's memory that may cache states and weights which rest in
    host memory, with their gradients; what torch and other programs left free after some steps is
    used, and given back when torch grows; null or "auto": no bound, but no cache with
    strata.device_budget; 0, or with strata.cuda_graphs: no cache
.device choice(auto|cpu|cuda) = "auto" | where the model trains; auto: on its current device, and
    models on the host move to the rank's GPU
.cuda_graphs flag = false | replay compiled blocks as CUDA graphs: engine.compile() makes them, and
    mode "reduce-overhead" and "max-autotune" are allowed; for steps that wait for the host
.move_inputs flag = true | copy host tensors among the arguments of forward and generate to the
    model's device
.collectives choice(auto|local|shm|c10d|nccl|peer) = "auto" | the transport between ranks: threads
    of one process (local), shared memory of one host (shm), torch.distributed (c10d); between GPUs
    copies (peer) or nccl for weights and gradients; auto: peer where all GPUs of a host reach each
    other
.gather choice(auto|peer|nccl) = "auto" | the transport of weights between GPUs of one shard group,
    if it shall differ from that of gradients; auto: from strata.collectives. If both are auto and
    NCCL runs already (the script uses it, or strata.reduce names it), a probe of some milliseconds
    compares both transports and selects nccl if it is 1.5 times as fast, because nccl takes
    multiprocessors from the model. The engine does not start NCCL for a probe, since that takes a
    second
.reduce choice(auto|peer|nccl) = "auto" | the transport of gradients between GPUs, as strata.gather
    for weights; peer sums 16-bit gradients in fp32 and in rank order, nccl in
    communication_data_type and in its own order
.max_live_bytes bytes(> 0) | upper bound on a rank's gathered bytes; gathered weights stay from
    forward to backward within it; null or "auto": from stage3_max_live_parameters
.wrap strings = [] | classes of the blocks that become units; []: the engine finds blocks
.unit_size bytes(> 0) | bytes of a unit where units are formed by size; null or "auto": the engine's
    own
.threads integer(1..1024) | threads of a rank for work on host memory; null or "auto": cores / ranks
    of the host, at most 32 (rank 0 uses more while it reads a whole model on the host at its
    start); if a launcher starts several ranks on a host, they run on the rank's own cores
.init section | how a model's values reach the engine
..tier choice(auto|device_copy|device_grow|distributed|host) = "auto" | the way for the values of a
    model that the script has built; auto: the first way for which every rank has memory
..read choice(auto|buffered|direct) = "auto" | read a checkpoint's files through the page cache
    (buffered) or past it (direct, O_DIRECT); auto: each rank measures, unless most bytes are cached
..replay_above numel(>= 0) = 1048576 | under zero.Init, a floating-point parameter of more elements
    gets no memory: its constructors are recorded and replayed on its shard, with random numbers
    that do not depend on the number of ranks; smaller ones are built as in torch
..report text | file to which rank 0 writes the start-up report as JSON; null: none
.timeout_s number(> 0) = 300.0 | seconds after which a rank that waits for another raises an error
.decay_unused flag = false | true: update a parameter without a gradient on any rank, as DeepSpeed
    does: it decays and its momentum goes on; false: it keeps its value, as in torch
.loss choice(auto|fused|plain) = "auto" | how a causal model of transformers computes its loss:
    from all logits (plain), or a block of the vocabulary at a time (fused), which holds no logits
    unless a script asks for them; auto: fused on a GPU where logits and loss would take more than
    half of its free memory
.mlp_piece integer(>= 0) | tokens that an MLP or an RMS norm of a decoder computes at a time in
    training; less memory for long rows, and no more work of MLPs where blocks are checkpointed; null
    or "auto": all on CPU ranks, and on a GPU where an MLP takes less than a quarter of its free
    memory, and a norm less than a 32nd; 0: all
.activations section | inputs of checkpointed blocks, which stay from forward to backward
..device choice(auto|cpu|device) = "auto" | where they stay: on the model's device, or on the host (cpu),
    copied beside the computation; auto: on the device where all would take less than a quarter of a
    GPU's free memory, else those of as many blocks as the first step shows to have room
.sequence_parallel section | rows that ranks share
.sequence_parallel.size integer(>= 1) = 1 | ranks that share the tokens of each row, in attention by
    an exchange of heads; it divides the ranks and the model's heads; batch sizes count these
    groups
.max_skipped_steps integer(0..1000000) = 20 | consecutive steps that may be skipped because
    gradients were not finite (fp32 and bf16); the next one raises NumericsError; 0: the first one
    does
.trace text | file to which rank 0 writes a timeline of some steps of all ranks for ui.perfetto.dev;
    null: none
.placement rules = [] | rules for single parameters; the first matching rule applies: `match`, a
    pattern of names, or `larger_than`, bytes ("200MB"), or both; `param` and `optimizer`, the tier
    of its weights and optimizer states: "device", "host", "nvme"; folders and staging are those of
    offload_param and offload_optimizer. "auto": the engine fills the device first, then the host,
    then the drive of an nvme_path, with the least used state last
.device_budget bytes(> 0) | bytes that the engine may hold on its device when placement is "auto",
    without activations; null or "auto": two thirds of the free memory at the start; no bound on CPU
    ranks, so nothing is offloaded
.host_budget bytes(> 0) | bytes of host memory that a rank may use for offloaded state and staging;
    null or "auto": its share of three quarters of the available memory at the start
.staging bytes(> 0) | bytes of host memory through which a rank stages what rests on drives, instead
    of the sum of offload_optimizer's and offload_param's buffers; what it does not need to stage
    keeps what was used last. At most one and a half times the bytes on drives are taken
.verify_drives flag = false | keep a checksum of each page written to a drive under offload (8 bytes
    for 4 KiB), and compare it when the page is read; a difference is an error
.tiles section | parameters that are gathered, used and reduced in tiles of rows (stage 3)
..max_gather bytes(> 0) | upper bound on gathered bytes of one parameter; a larger one is cut into
    tiles. null or "auto": tiles of 256 MiB for parameters that take more than half of the free
    memory of the fullest GPU, where a tiling rule exists; none on CPU ranks
..match strings = [] | patterns of names: only parameters that match one are cut; []: all
.trace_steps integer(1..100) = 3 | steps in the timeline, after two warm-up steps
)";

}  // namespace strata::engine
