"""The names of each module below ``deepspeed``: {path: {name: target}}.

A target is "module:name" of an object in Strata, "module:" for a module itself, a ``Refusal``, or a value. Scripts can
import a name that Strata does not offer, and inherit from it; any use raises."""

from typing import NamedTuple

from . import VERSION


class Refusal(NamedTuple):
    """The reason why Strata does not offer a name."""

    what: str  # "pipeline parallelism"
    instead: str = ""  # a whole sentence


def refused(name, refusal):
    """A class that stands for ``name``, a full name ("deepspeed.pipe.PipelineModule"); a call of it raises, too."""
    return _Refused(name.rpartition(".")[2], (), {"_refused": (name, refusal), "__doc__": _text(name, refusal)})


def refused_method(name, refusal):
    """A method that stands for ``name`` and raises NotImplementedError."""

    def method(self, *args, **kwargs):
        raise NotImplementedError(_text(name, refusal))

    method.__name__, method.__doc__ = name.rpartition(".")[2], _text(name, refusal)
    return method


def _text(name, refusal):
    return f"{name}: Strata does not offer {refusal.what}. " + (
        refusal.instead or "Use DeepSpeed itself for it: start without STRATA_COMPAT and 'strata run'.")


class _Refused(type):
    """The class of such classes. They have no instances, and ``isinstance`` is always False. A call, and a read of a
    method or another attribute, raises NotImplementedError."""

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(_text(*cls._refused))

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(_text(*cls._refused))


# --- names that Strata does not offer ---

REFUSALS = {
    "inference": Refusal("an inference engine", "Generate with the model itself: engine.module.generate(...)."),
    "pipeline": Refusal("pipeline parallelism"),
    "tensor": Refusal("tensor parallelism", "Set tensor_parallel.autotp_size to 1, or leave the section out."),
    "kernels": Refusal("kernels of transformer layers", "Use the attention implementations of torch and transformers."),
    "hybrid": Refusal("the hybrid engine", "Generate with the model itself: engine.module.generate(...)."),
    "universal": Refusal(
        "the universal format", "Strata's checkpoints load at any number of ranks without conversion."),
    "compression": Refusal("compression of models"),
    "experts": Refusal(
        "layers of experts and expert parallelism", "Experts of the model itself train like other modules."),
    "onebit": Refusal("optimizers that compress what travels", "Use AdamW."),
    "operators": Refusal("DeepSpeed's own operators", "Strata has its own; `strata bench-io` measures drives."),
    "random numbers": Refusal("model parallelism's random numbers", "Use torch's random numbers."),
    "tiling": Refusal(
        "tiled layers", "Set strata.tiles.max_gather, which has large parameters used in tiles; "
        "strata.nn.linear_cross_entropy is a loss without all logits."),
    "MiCS": Refusal("a context of MiCS of its own", "Use zero.Init, and zero_optimization.mics_shard_size."),
    "estimates": Refusal("estimates by formula", "strata.memory_forecast(...) and `strata plan` say it in bytes."),
    "tuning": Refusal("autotuning"),
    "elastic": Refusal("elastic batch sizes", "Checkpoints load at any number of ranks; set the batch sizes yourself."),
    "monitors": Refusal(
        "writers of metrics apart from the engine",
        "Name them in the configuration; engine.monitor.write_events(...) writes."),
    "LAMB": Refusal("the optimizer LAMB", "Pass another library's, such as timm.optim.Lamb: it gets whole parameters."),
    "profiler": Refusal(
        "a profiler of operations apart from the engine",
        "Set flops_profiler.enabled in the configuration, or use torch.profiler."),
    "curriculum": Refusal("curriculum learning and data sampling"),
    "sequence": Refusal("attention of Megatron's models under sequence parallelism",
                        "Models of transformers need no change: set strata.sequence_parallel.size."),
}

# Methods of the engine.
REFUSED_METHODS = {
    "load_moe_state_dict": REFUSALS["experts"], "random_ltd_initialize": Refusal("random layerwise token dropping"),
    "register_compile_pass": Refusal("passes of DeepCompile", "Use torch.compile: engine.compile(backend=...)."),
    "set_custom_curriculum_learning_schedule": REFUSALS["curriculum"]}

# Columns: the key in REFUSALS; paths below ``deepspeed``, whose own path is "."; names there.
_REFUSED = """
inference | . inference.config | DeepSpeedInferenceConfig
inference | . inference inference.engine | InferenceEngine
inference | . | default_inference_config init_inference
inference | inference | RaggedInferenceEngineConfig build_hf_engine
pipeline | . runtime.pipe.engine | PipelineEngine
pipeline | . pipe runtime.pipe runtime.pipe.module | PipelineModule
pipeline | pipe runtime.pipe runtime.pipe.module | LayerSpec TiedLayerSpec
pipeline | pipe runtime.pipe runtime.pipe.module runtime.pipe.topology | ProcessTopology
pipeline | runtime.pipe.topology | PipeModelDataParallelTopology PipelineParallelGrid
tensor | . module_inject | replace_transformer_layer set_autotp_mode
tensor | . | tp_model_init
tensor | module_inject | replace_module
tensor | module_inject.layers | GatherReplacedLayerParams LinearAllreduce LinearLayer
tensor | runtime.tensor_parallel | TpTrainingManager
kernels | . ops.transformer | DeepSpeedTransformerConfig DeepSpeedTransformerLayer
kernels | ops.sparse_attention | BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig
    FixedSparsityConfig SparseAttentionUtils SparseSelfAttention VariableSparsityConfig
hybrid | . runtime.hybrid_engine | DeepSpeedHybridEngine
universal | checkpoint | DeepSpeedCheckpoint ds_to_universal
universal | checkpoint.ds_to_universal | main
compression | compression compression.compress | init_compression redundancy_clean
compression | compression.compress | student_initialization
experts | moe moe.layer | MoE
experts | moe.experts | Experts
experts | moe.sharded_moe | MOELayer TopKGate
onebit | ops.adam | ZenFlowCPUAdam ZenFlowSelectiveAdamW
onebit | runtime.fp16.onebit | OnebitAdam OnebitLamb ZeroOneAdam
operators | ops.op_builder | GDSBuilder OpBuilder
random numbers | runtime.activation_checkpointing.checkpointing | get_cuda_rng_tracker get_rng_tracker
    model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed
tiling | runtime.zero runtime.zero.tiling | TiledLinear TiledLinearReturnBias
MiCS | runtime.zero runtime.zero.mics | MiCS_Init
MiCS | runtime.zero.mics | MiCS_Optimizer
estimates | runtime.zero.stage3 | estimate_zero3_model_states_mem_needs_all_cold
    estimate_zero3_model_states_mem_needs_all_live
estimates | runtime.zero.stage_1_and_2 | estimate_zero2_model_states_mem_needs_all_cold
    estimate_zero2_model_states_mem_needs_all_live
tuning | autotuning | Autotuner
elastic | elasticity | compute_elastic_config elasticity_enabled ensure_immutable_elastic_config
monitors | monitor.monitor | MonitorMaster
LAMB | ops.lamb | FusedLamb
profiler | profiling.flops_profiler profiling.flops_profiler.profiler | FlopsProfiler get_model_profile
curriculum | runtime.data_pipeline | CurriculumScheduler
sequence | sequence.layer | DistributedAttention
"""

# --- constants that scripts import: {path below ``deepspeed``: {name: value}} ---


def _lower(names):
    return {name: name.lower() for name in names.split()}


_CONFIGURED = {f"{name}_OPTIMIZER": name.lower() for name in "ADAGRAD ADAM ADAMW LAMB LION MUON".split()}
_SCHEDULES = {"LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR",
              "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR"}  # fmt: skip
LEAVES = ["transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
          "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
          "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"]
_VERSION = {"version": VERSION, "git_hash": None, "git_branch": None}
_MAJOR, _MINOR, _PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))

CONSTANTS = {
    "": {**_VERSION, "__version__": VERSION, "__version_major__": _MAJOR, "__version_minor__": _MINOR,
         "__version_patch__": _PATCH, "__git_branch__": None, "__git_hash__": None, "HAS_TRITON": False},
    "git_version_info": {**_VERSION, "installed_ops": {}},
    "runtime.config": {**_CONFIGURED, "DEEPSPEED_OPTIMIZERS": list(_CONFIGURED.values())},
    "runtime.constants": {
        **_lower("GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING LOG_LEVEL TRAIN_BATCH_SIZE "
                 "TRAIN_MICRO_BATCH_SIZE_PER_GPU"),
        "GRADIENT_CLIPPING_DEFAULT": 1.0, "LOG_LEVEL_DEFAULT": None,
        "ROUTE_EVAL": "eval", "ROUTE_PREDICT": "predict", "ROUTE_TRAIN": "train"},
    "runtime.lr_schedules": {
        **_SCHEDULES, "VALID_LR_SCHEDULES": list(_SCHEDULES.values()),
        **_lower("LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
                 "LR_RANGE_TEST_STAIRCASE EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT "
                 "CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR "
                 "DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR "
                 "WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS"),
        "WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"},
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024 * 1024},
    "runtime.zero.config": _lower("ZERO_OPTIMIZATION"),
    "runtime.zero.leaf_module_config": {"DEFAULT_LEAF_MODULE_CLASSES": LEAVES, "DEFAULT_LEAF_MODULE_NAMES": [],
                                        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": []},
    "runtime.zero.offload_states": {}}


# --- names that Strata offers ---

# Second names of modules: {path: path of MODULES}.
ALIASES = {"checkpointing": "runtime.activation_checkpointing.checkpointing", "zero": "runtime.zero"}

# Columns: the module of the objects; paths below ``deepspeed``; names, as "name=object" where the two differ.
_OFFERED = """
deepspeed.comm | . | dist=
strata._C | . runtime.config | DeepSpeedConfigError=ConfigError
strata._C | runtime.zero.utils | ZeRORuntimeException=UsageError
strata.batches | runtime.dataloader utils | RepeatingLoader
strata.clocks | utils.timer | ThroughputTimer
strata.compat.accelerator | . utils | OnDevice
strata.compat.accelerator | . accelerator accelerator.real_accelerator | get_accelerator
strata.compat.accelerator | accelerator | DeepSpeedAccelerator=Accelerator
strata.compat.accelerator | git_version_info | compatible_ops=COMPATIBLE torch_info=TORCH_INFO
strata.compat.accelerator | ops | __compatible_ops__=COMPATIBLE
strata.compat.accelerator | ops.aio ops.op_builder | AsyncIOBuilder
strata.compat.accelerator | ops.op_builder | CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder
    FusedLambBuilder FusedLionBuilder UtilsBuilder
strata.compat.accelerator | runtime.utils | memory_status see_memory_usage
strata.compat.accelerator | utils.torch | is_functorch_transforming required_torch_version
strata.compat.checkpointing | runtime.activation_checkpointing.checkpointing | CheckpointFunction checkpoint
    configure is_configured non_reentrant_checkpoint=checkpoint reset
strata.compat.checkpointing | runtime.fp16.loss_scaler | DynamicLossScaler LossScaler LossScalerBase
strata.compat.checkpointing | utils utils.tensor_fragment | fragment_address
strata.compat.checkpointing | utils.zero_to_fp32 | get_model_state_file get_optim_files
strata.compat.communication | . comm comm.comm | init_distributed
strata.compat.communication | accelerator | is_current_accelerator_supported=yes
strata.compat.communication | comm comm.comm | get_all_ranks_from_group get_local_rank get_rank get_world_group
    get_world_size has_all_gather_into_tensor=yes has_reduce_scatter_tensor=yes
strata.compat.communication | comm comm.comm utils | is_initialized
strata.compat.communication | utils utils.groups | _get_data_parallel_group=get_world_group
    _get_data_parallel_group_ranks=get_all_ranks_from_group _get_data_parallel_rank=get_rank
    _get_model_parallel_world_size=one
    _get_sequence_data_parallel_group=get_world_group _get_sequence_data_parallel_rank=get_rank
    _get_sequence_data_parallel_world_size=get_world_size
    get_data_parallel_group=get_world_group get_data_parallel_rank=get_rank
    get_model_parallel_rank=zero get_model_parallel_world_size=one
    get_tensor_model_parallel_rank=zero get_tensor_model_parallel_world_size=one
strata.compat.communication | runtime.sequence_parallel.parallel_state_sp | get_sequence_data_parallel_rank=get_rank
    get_sequence_data_parallel_group=get_world_group get_sequence_data_parallel_world_size=get_world_size
strata.compat.config | . runtime.config | DeepSpeedConfig get_gradient_clipping get_log_level
strata.compat.config | . runtime.config runtime.zero.config | DeepSpeedZeroConfig
strata.compat.config | runtime.lr_schedules | get_lr_from_config get_torch_optimizer
strata.compat.config | runtime.zero runtime.zero.partition_parameters | ZeroParamType
strata.compat.config | runtime.zero.config runtime.zero.offload_config | DeepSpeedZeroOffloadOptimizerConfig
    DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum
strata.compat.config | runtime.zero.config | get_zero_config ZeroStageEnum
strata.compat.config | runtime.zero.leaf_module_config | DeepSpeedZeroLeafModuleConfig
strata.compat.config | runtime.zero.offload_config | OffloadStateTypeEnum
strata.compat.engine | . runtime.engine | DeepSpeedEngine
strata.compat.engine | . | initialize
strata.compat.launcher | launcher.runner | DEEPSPEED_ENVIRONMENT_NAME main=run
strata.compat.script_functions | checkpoint.utils | clone_tensors_for_torch_save get_model_ckpt_name_for_rank
strata.compat.script_functions | compression.helper utils.module_utils | recursive_getattr recursive_setattr
strata.compat.script_functions | moe.utils | configure_moe_param_groups=as_it_is has_moe_layers is_moe_param
    is_moe_param_group split_params_into_different_moe_groups_for_optimizer
strata.compat.script_functions | runtime.utils | copy_to_device=move_to_device move_to_device clip_grad_norm_
    get_global_norm get_grad_norm get_weight_norm ensure_directory_exists set_random_seed
strata.compat.script_functions | utils utils.nvtx | instrument_w_nvtx=as_it_is
strata.compat.script_functions | utils utils.logging | set_log_level_from_string
strata.compat.script_functions | utils.logging | should_log_le
strata.compat.sequence | runtime.sequence_parallel.ulysses_sp | UlyssesSPAttentionHF
strata.compat.sharding | . runtime.base_optimizer | DeepSpeedOptimizer
strata.compat.sharding | runtime.base_optimizer | ZeROOptimizer
strata.compat.sharding | runtime.bf16_optimizer | BF16_Optimizer
strata.compat.sharding | runtime.fp16.fused_optimizer | FP16_Optimizer
strata.compat.sharding | runtime.fp16.unfused_optimizer | FP16_UnfusedOptimizer=FP16_Optimizer
strata.compat.sharding | runtime.utils | DummyOptim
strata.compat.sharding | runtime.zero runtime.zero.partition_parameters | GatheredParameters Init
    register_external_parameter unregister_external_parameter=register_external_parameter
strata.compat.sharding | runtime.zero runtime.zero.parameter_offload | DeepSpeedZeRoOffload=ParameterOffload
strata.compat.sharding | runtime.zero runtime.zero.stage3 | unwrap_model_for_generation
strata.compat.sharding | runtime.zero.partition_parameters | zero_wrapper_for_fp_tensor_constructor
strata.compat.sharding | runtime.zero.stage3 | DeepSpeedZeroOptimizer_Stage3
strata.compat.sharding | runtime.zero.stage_1_and_2 | DeepSpeedZeroOptimizer
strata.compat.tiling | runtime.sequence_parallel.ulysses_sp | SequenceTiledCompute TiledFusedLogitsLoss TiledMLP
    sequence_tiled_compute
strata.config_source | . | add_config_arguments
strata.doctor | env_report | cli_main=ds_report main=ds_report
strata.model.leaves | utils utils.z3_leaf_module | get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
    set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
strata.model.parameter | runtime.zero runtime.zero.partition_parameters | ZeroParamStatus=ParameterStatus
strata.monitoring.watching | comm comm.comm | log_summary
strata.ops.adagrad | ops.adagrad | DeepSpeedCPUAdagrad
strata.ops.adam | ops.adam | DeepSpeedCPUAdam FusedAdam
strata.ops.lion | ops.lion | DeepSpeedCPULion FusedLion
strata.parameter_states | utils utils.tensor_fragment | safe_get_full_fp32_param safe_get_full_grad
    safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
    safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param
    safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
strata.rank_logging | . utils utils.logging | log_dist logger
strata.rank_logging | utils.logging | get_current_level=logger.getEffectiveLevel
strata.schedule | runtime.lr_schedules | LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR
strata.sequence.groups | utils utils.groups | _get_data_parallel_world_size=get_data_parallel_world_size
    _get_sequence_parallel_group=get_sequence_parallel_group _get_sequence_parallel_rank=get_sequence_parallel_rank
    _get_sequence_parallel_world_size=get_sequence_parallel_world_size get_data_parallel_world_size
strata.sequence.groups | runtime.sequence_parallel.parallel_state_sp | initialize_sequence_parallel
    get_model_parallel_group=get_sequence_parallel_group get_model_parallel_rank=get_sequence_parallel_rank
    get_model_parallel_world_size=get_sequence_parallel_world_size get_sequence_parallel_group
    get_sequence_parallel_rank get_sequence_parallel_world_size
strata.sequence.loader | runtime.sequence_parallel.ulysses_sp | UlyssesSPDataLoaderAdapter
strata.utils.zero_to_fp32 | utils.zero_to_fp32 | convert_zero_checkpoint_to_fp32_state_dict
    get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
torch | utils.torch | register_grad_hook=Tensor.register_post_accumulate_grad_hook
torch | runtime.zero.partition_parameters | _orig_torch_arange=arange _orig_torch_empty=empty _orig_torch_eye=eye
    _orig_torch_full=full _orig_torch_ones=ones _orig_torch_randn=randn _orig_torch_tensor=tensor
    _orig_torch_zeros=zeros
torch.cuda | runtime.utils | empty_cache
torch.distributed | comm comm.comm | P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list destroy_process_group gather get_global_rank irecv is_available isend monitored_barrier
    new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send allgather_fn=all_gather_into_tensor
    inference_all_reduce=all_reduce reduce_scatter_fn=reduce_scatter_tensor
torch.nn | runtime.zero.linear | LinearModuleForZeroStage3=Linear
torch.nn.functional | runtime.zero.linear | zero3_linear_wrap=linear
typing | runtime.engine | DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable
"""


def _rows(table):
    """(first column, path, name) of each name."""
    for line in table.strip().replace("\n    ", " ").splitlines():
        first, paths, names = line.split(" | ")
        yield from ((first, path.strip("."), name) for path in paths.split() for name in names.split())


def _joined():
    joined = {path: {**names} for path, names in CONSTANTS.items()}
    for home, path, name in _rows(_OFFERED):
        name, differs, target = name.partition("=")
        joined.setdefault(path, {})[name] = f"{home}:{target if differs else name}"
    for key, path, name in _rows(_REFUSED):
        joined.setdefault(path, {})[name] = REFUSALS[key]
    for path in list(joined):
        parts = path.split(".")
        for count in range(len(parts)):
            joined.setdefault(".".join(parts[:count]), {})  # the packages that it is in
    return joined


MODULES = _joined()
