"""The names of each module below ``deepspeed``: {path: {name: target}}.

A target is "module:name" of an object in Strata, "module:" for a module itself, a ``Refusal``, or a value. Scripts can
import a name that Strata does not offer, and inherit from it; any use raises.
"""

from typing import NamedTuple

from . import VERSION


class Refusal(NamedTuple):
    """The reason why Strata does not offer a name."""

    what: str  # "pipeline parallelism"
    instead: str = ""  # a whole sentence


def refused(name, refusal):
    """A class that stands for ``name``; calls as a function raise, too.

    Args:
        name: the full name, "deepspeed.pipe.PipelineModule".
        refusal: a ``Refusal``.
    """
    return _Refused(name.rpartition(".")[2], (), {"_refused": (name, refusal), "__doc__": _text(name, refusal)})


def refused_method(name, refusal):
    """A method that stands for ``name`` and raises NotImplementedError."""

    def method(self, *args, **kwargs):
        raise NotImplementedError(_text(name, refusal))

    method.__name__, method.__doc__ = name.rpartition(".")[2], _text(name, refusal)
    return method


def _text(name, refusal):
    return f"{name}: Strata does not offer {refusal.what}. " + (
        refusal.instead or "Use DeepSpeed itself for it: start without STRATA_COMPAT and 'strata run'."
    )


class _Refused(type):
    """The class of such classes. They have no instances, and ``isinstance`` is always False.

    Raises:
        NotImplementedError: at a call, and at a read of a method or another attribute.
    """

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(_text(*cls._refused))

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(_text(*cls._refused))


# --- names that Strata does not offer: {path below ``deepspeed``: {name: Refusal}} ---

_PIPELINE = Refusal("pipeline parallelism")
_TENSOR = Refusal("tensor parallelism", "Set tensor_parallel.autotp_size to 1, or leave the section out.")
_SEQUENCE = Refusal("sequence parallelism (Ulysses)", "Set the size of sequence parallelism to 1.")
_INFERENCE = Refusal("an inference engine", "Generate with the model itself: engine.module.generate(...).")
_COMPRESSION = Refusal("compression of models")
_EXPERTS = Refusal("layers of experts and expert parallelism", "Experts of the model itself train like other modules.")
_KERNELS = Refusal("kernels of transformer layers", "Use the attention implementations of torch and transformers.")
_BUILDERS = Refusal("DeepSpeed's own operators", "Strata has its own; `strata bench-io` measures drives.")
_TILING = Refusal("tiled layers", "Set strata.tiles.max_gather, which has large parameters used in tiles; "
                  "strata.nn.linear_cross_entropy is a loss without all logits.")
_PROFILER = Refusal("a profiler of operations apart from the engine",
                    "Set flops_profiler.enabled in the configuration, or use torch.profiler.")
_ELASTIC = Refusal("elastic batch sizes", "Checkpoints load at any number of ranks; set the batch sizes yourself.")
_ESTIMATE = Refusal("estimates by formula", "strata.memory_forecast(...) and `strata plan` say it in bytes.")
_MONITOR = Refusal("writers of metrics apart from the engine",
                   "Name them in the configuration; engine.monitor.write_events(...) writes.")
_TUNING = Refusal("autotuning")
_MICS = Refusal("a context of MiCS of its own", "Use zero.Init, and zero_optimization.mics_shard_size.")
_LAMB = Refusal("the optimizer LAMB", "Use an optimizer of torch, or another library's; it runs on the shards.")
_ONEBIT = Refusal("optimizers that compress what travels", "Use AdamW.")
_HYBRID = Refusal("the hybrid engine", "Generate with the model itself: engine.module.generate(...).")
_CURRICULUM = Refusal("curriculum learning and data sampling")
_MODEL_PARALLEL = Refusal("model parallelism's random numbers", "Use torch's random numbers.")
_UNIVERSAL = Refusal("the universal format", "Strata's checkpoints load at any number of ranks without conversion.")


def _all(refusal, names):
    return dict.fromkeys(names.split(), refusal)


_PIPE = _all(_PIPELINE, "LayerSpec PipelineModule ProcessTopology TiedLayerSpec")

REFUSED = {
    "": {
        **_all(_INFERENCE, "DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference"),
        **_all(_PIPELINE, "PipelineEngine PipelineModule"),
        **_all(_TENSOR, "replace_transformer_layer set_autotp_mode tp_model_init"),
        **_all(_KERNELS, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
        **_all(_HYBRID, "DeepSpeedHybridEngine"),
    },
    "autotuning": _all(_TUNING, "Autotuner"),
    "checkpoint": _all(_UNIVERSAL, "DeepSpeedCheckpoint ds_to_universal"),
    "checkpoint.ds_to_universal": _all(_UNIVERSAL, "main"),
    "compression": _all(_COMPRESSION, "init_compression redundancy_clean"),
    "compression.compress": _all(_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "elasticity": _all(_ELASTIC, "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"),
    "inference": _all(_INFERENCE, "InferenceEngine RaggedInferenceEngineConfig build_hf_engine"),
    "inference.config": _all(_INFERENCE, "DeepSpeedInferenceConfig"),
    "inference.engine": _all(_INFERENCE, "InferenceEngine"),
    "module_inject": _all(_TENSOR, "replace_module replace_transformer_layer set_autotp_mode"),
    "module_inject.layers": _all(_TENSOR, "GatherReplacedLayerParams LinearAllreduce LinearLayer"),
    "moe": _all(_EXPERTS, "MoE"),
    "moe.layer": _all(_EXPERTS, "MoE"),
    "moe.experts": _all(_EXPERTS, "Experts"),
    "moe.sharded_moe": _all(_EXPERTS, "MOELayer TopKGate"),
    "monitor.monitor": _all(_MONITOR, "MonitorMaster"),
    "ops.adam": _all(_ONEBIT, "ZenFlowCPUAdam ZenFlowSelectiveAdamW"),
    "ops.lamb": _all(_LAMB, "FusedLamb"),
    "ops.op_builder": _all(_BUILDERS, "GDSBuilder OpBuilder"),
    "ops.sparse_attention": _all(_KERNELS, "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig "
                                 "FixedSparsityConfig SparseAttentionUtils SparseSelfAttention VariableSparsityConfig"),
    "ops.transformer": _all(_KERNELS, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    "pipe": _PIPE,
    "profiling.flops_profiler": _all(_PROFILER, "FlopsProfiler get_model_profile"),
    "profiling.flops_profiler.profiler": _all(_PROFILER, "FlopsProfiler get_model_profile"),
    "runtime.activation_checkpointing.checkpointing": _all(
        _MODEL_PARALLEL, "get_cuda_rng_tracker get_rng_tracker model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed"),
    "runtime.data_pipeline": _all(_CURRICULUM, "CurriculumScheduler"),
    "runtime.fp16.onebit": _all(_ONEBIT, "OnebitAdam OnebitLamb ZeroOneAdam"),
    "runtime.hybrid_engine": _all(_HYBRID, "DeepSpeedHybridEngine"),
    "runtime.pipe": _PIPE,
    "runtime.pipe.engine": _all(_PIPELINE, "PipelineEngine"),
    "runtime.pipe.module": _PIPE,
    "runtime.pipe.topology": _all(_PIPELINE, "PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology"),
    "runtime.sequence_parallel.ulysses_sp": {
        **_all(_SEQUENCE, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **_all(_TILING, "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP"),
    },
    "runtime.tensor_parallel": _all(_TENSOR, "TpTrainingManager"),
    "runtime.zero": {
        **_all(_TILING, "TiledLinear TiledLinearReturnBias"),
        **_all(_MICS, "MiCS_Init"),
    },
    "runtime.zero.mics": _all(_MICS, "MiCS_Init MiCS_Optimizer"),
    "runtime.zero.stage3": _all(_ESTIMATE, "estimate_zero3_model_states_mem_needs_all_cold "
                                "estimate_zero3_model_states_mem_needs_all_live"),
    "runtime.zero.stage_1_and_2": _all(_ESTIMATE, "estimate_zero2_model_states_mem_needs_all_cold "
                                       "estimate_zero2_model_states_mem_needs_all_live"),
    "runtime.zero.tiling": _all(_TILING, "TiledLinear TiledLinearReturnBias"),
    "sequence.layer": _all(_SEQUENCE, "DistributedAttention"),
}

# Methods of the engine.
REFUSED_METHODS = {
    "load_moe_state_dict": _EXPERTS,
    "random_ltd_initialize": Refusal("random layerwise token dropping"),
    "register_compile_pass": Refusal("passes of DeepCompile", "Use torch.compile: engine.compile(backend=...)."),
    "set_custom_curriculum_learning_schedule": _CURRICULUM,
}


# --- constants that scripts import: {path below ``deepspeed``: {name: value}} ---

_SCHEDULES = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}
_OF_SCHEDULES = (
    "LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
    "EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
    "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM "
    "DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO "
    "TOTAL_NUM_STEPS"
).split()
_CONFIGURED = {f"{name}_OPTIMIZER": name.lower() for name in "ADAGRAD ADAM ADAMW LAMB LION MUON".split()}
LEAVES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]

CONSTANTS = {
    "runtime.config": {**_CONFIGURED, "DEEPSPEED_OPTIMIZERS": list(_CONFIGURED.values())},
    "runtime.constants": {
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_CLIPPING": "gradient_clipping",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "LOG_LEVEL": "log_level",
        "LOG_LEVEL_DEFAULT": None,
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
    },
    "runtime.lr_schedules": {
        **_SCHEDULES,
        **{name: name.lower() for name in _OF_SCHEDULES},
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LINEAR_RATE": "linear",
        "VALID_LR_SCHEDULES": list(_SCHEDULES.values()),
    },
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024 * 1024},
    "runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": LEAVES,
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
}


# --- names that Strata offers ---

# Second names of modules: {path: path of MODULES}.
ALIASES = {
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "zero": "runtime.zero",
}


def _of(home, names):
    return {name: f"{home}:{name}" for name in names.split()}


_STATES = _of(
    "strata.parameter_states",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
)
_LEAVES = _of(
    "strata.model.leaves",
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
)
_LOGGING = _of("strata.rank_logging", "log_dist logger")
_COMM = {
    **_of(
        "torch.distributed",
        "P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce "
        "all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list "
        "destroy_process_group gather get_global_rank irecv is_available isend monitored_barrier "
        "new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send",
    ),
    **_of(
        "strata.compat.communication",
        "get_all_ranks_from_group get_local_rank get_rank get_world_group get_world_size init_distributed "
        "is_initialized",
    ),
    "log_summary": "strata.monitoring.watching:log_summary",
    "allgather_fn": "torch.distributed:all_gather_into_tensor",
    "has_all_gather_into_tensor": "strata.compat.communication:yes",
    "has_reduce_scatter_tensor": "strata.compat.communication:yes",
    "inference_all_reduce": "torch.distributed:all_reduce",
    "reduce_scatter_fn": "torch.distributed:reduce_scatter_tensor",
}
_GROUPS = _of(
    "strata.compat.communication",
    "_get_data_parallel_group _get_data_parallel_group_ranks _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_model_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
    "_get_sequence_data_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
    "_get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
    "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size",
)
_ENGINE = {"DeepSpeedEngine": "strata.compat.engine:DeepSpeedEngine"}
_CONFIG = {
    "DeepSpeedConfig": "strata.compat.config:DeepSpeedConfig",
    "DeepSpeedConfigError": "strata._C:ConfigError",
    "DeepSpeedZeroConfig": "strata.compat.config:DeepSpeedZeroConfig",
    "get_gradient_clipping": "strata.compat.config:get_gradient_clipping",
    "get_log_level": "strata.compat.config:get_log_level",
}
_SHARDING = {
    "GatheredParameters": "strata.compat.sharding:GatheredParameters",
    "Init": "strata.compat.sharding:Init",
    "ZeroParamStatus": "strata.model.parameter:ParameterStatus",
    "ZeroParamType": "strata.compat.config:ZeroParamType",
    "register_external_parameter": "strata.compat.sharding:register_external_parameter",
    "unregister_external_parameter": "strata.compat.sharding:unregister_external_parameter",
}
_TENSORS = "strata.compat.script_functions"
_PATHS = _of("strata.compat.script_functions", "recursive_getattr recursive_setattr")
_OFFLOAD = {"DeepSpeedZeRoOffload": "strata.compat.sharding:ParameterOffload"}
_SCALERS = _of("strata.compat.checkpointing", "DynamicLossScaler LossScaler LossScalerBase")
_ENUMERATIONS = "strata.compat.config"
_OPTIMIZERS = "strata.compat.sharding"
_VERSION = {"version": VERSION, "git_hash": None, "git_branch": None}
_MAJOR, _MINOR, _PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))

_OFFERED = {
    "": {
        **_ENGINE,
        "DeepSpeedOptimizer": f"{_OPTIMIZERS}:DeepSpeedOptimizer",
        "HAS_TRITON": False,
        "OnDevice": "strata.compat.accelerator:OnDevice",
        "__git_branch__": None,
        "__git_hash__": None,
        "__version__": VERSION,
        "__version_major__": _MAJOR,
        "__version_minor__": _MINOR,
        "__version_patch__": _PATCH,
        "add_config_arguments": "strata.config_source:add_config_arguments",
        "dist": "deepspeed.comm:",
        "get_accelerator": "strata.compat.accelerator:get_accelerator",
        "init_distributed": "strata.compat.communication:init_distributed",
        "initialize": "strata.compat.engine:initialize",
        **_CONFIG,
        **_LOGGING,
        **_VERSION,
    },
    "accelerator": {
        "DeepSpeedAccelerator": "strata.compat.accelerator:Accelerator",
        "get_accelerator": "strata.compat.accelerator:get_accelerator",
        "is_current_accelerator_supported": "strata.compat.communication:yes",
    },
    "accelerator.real_accelerator": {"get_accelerator": "strata.compat.accelerator:get_accelerator"},
    "checkpoint.utils": {
        "clone_tensors_for_torch_save": f"{_TENSORS}:clone_tensors_for_torch_save",
        "get_model_ckpt_name_for_rank": f"{_TENSORS}:get_model_ckpt_name_for_rank",
    },
    "comm": _COMM,
    "comm.comm": _COMM,
    "git_version_info": {**_VERSION, "installed_ops": {}, "compatible_ops": "strata.compat.accelerator:COMPATIBLE",
                         "torch_info": "strata.compat.accelerator:TORCH_INFO"},
    "compression.helper": _PATHS,
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": "strata.compat.launcher:DEEPSPEED_ENVIRONMENT_NAME"},
    "moe.utils": _of(
        "strata.compat.script_functions",
        "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
        "split_params_into_different_moe_groups_for_optimizer",
    ),
    "ops": {"__compatible_ops__": "strata.compat.accelerator:COMPATIBLE"},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": "strata.ops.adagrad:DeepSpeedCPUAdagrad"},
    "ops.adam": _of("strata.ops.adam", "DeepSpeedCPUAdam FusedAdam"),
    "ops.aio": _of("strata.compat.accelerator", "AsyncIOBuilder"),
    "ops.lion": _of("strata.ops.lion", "DeepSpeedCPULion FusedLion"),
    "ops.op_builder": _of(
        "strata.compat.accelerator",
        "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder "
        "FusedLionBuilder UtilsBuilder",
    ),
    "runtime.activation_checkpointing.checkpointing": _of(
        "strata.compat.checkpointing", "CheckpointFunction checkpoint configure is_configured non_reentrant_checkpoint "
        "reset"
    ),
    "runtime.base_optimizer": _of(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.config": _CONFIG,
    "runtime.dataloader": _of("strata.batches", "RepeatingLoader"),
    "runtime.engine": {
        **_ENGINE,
        "DeepSpeedOptimizerCallable": "typing:Callable",
        "DeepSpeedSchedulerCallable": "typing:Callable",
    },
    "runtime.bf16_optimizer": _of(_OPTIMIZERS, "BF16_Optimizer"),
    "runtime.fp16.fused_optimizer": _of(_OPTIMIZERS, "FP16_Optimizer"),
    "runtime.fp16.loss_scaler": _SCALERS,
    "runtime.fp16.unfused_optimizer": _of(_OPTIMIZERS, "FP16_UnfusedOptimizer"),
    "runtime.lr_schedules": {
        **_of("strata.schedule", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
        "get_lr_from_config": "strata.compat.config:get_lr_from_config",
        "get_torch_optimizer": "strata.compat.config:get_torch_optimizer",
    },
    "runtime.utils": {
        **_of(_TENSORS, "copy_to_device move_to_device"),
        **_of("strata.compat.accelerator", "empty_cache memory_status see_memory_usage"),
        **_of("strata.compat.script_functions", "clip_grad_norm_ get_global_norm get_grad_norm get_weight_norm"),
        "DummyOptim": "strata.compat.sharding:DummyOptim",
        "ensure_directory_exists": "strata.compat.script_functions:ensure_directory_exists",
        "set_random_seed": "strata.compat.script_functions:set_random_seed",
    },
    "runtime.zero": {**_SHARDING, **_OFFLOAD,
                     "unwrap_model_for_generation": "strata.compat.sharding:unwrap_model_for_generation"},
    "runtime.zero.config": {
        **_of("strata.compat.config", "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig "
              "DeepSpeedZeroOffloadParamConfig get_zero_config"),
        **_of(_ENUMERATIONS, "OffloadDeviceEnum ZeroStageEnum"),
        "ZERO_OPTIMIZATION": "zero_optimization",
    },
    "runtime.zero.leaf_module_config": _of("strata.compat.config", "DeepSpeedZeroLeafModuleConfig"),
    "runtime.zero.linear": {"LinearModuleForZeroStage3": "torch.nn:Linear",
                            "zero3_linear_wrap": "torch.nn.functional:linear"},
    "runtime.zero.offload_config": {
        **_of(_ENUMERATIONS, "OffloadDeviceEnum OffloadStateTypeEnum"),
        **_of("strata.compat.config", "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"),
    },
    "runtime.zero.offload_states": {},
    "runtime.zero.parameter_offload": _OFFLOAD,
    "runtime.zero.partition_parameters": {
        **_SHARDING,
        **{f"_orig_torch_{name}": f"torch:{name}"
           for name in ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros")},
        "zero_wrapper_for_fp_tensor_constructor": "strata.compat.sharding:zero_wrapper_for_fp_tensor_constructor",
    },
    "runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": f"{_OPTIMIZERS}:DeepSpeedZeroOptimizer_Stage3",
        "unwrap_model_for_generation": "strata.compat.sharding:unwrap_model_for_generation",
    },
    "runtime.zero.utils": {"ZeRORuntimeException": "strata._C:UsageError"},
    "runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": f"{_OPTIMIZERS}:DeepSpeedZeroOptimizer"},
    "utils": {
        **_LOGGING,
        **_STATES,
        **_LEAVES,
        **_GROUPS,
        "OnDevice": "strata.compat.accelerator:OnDevice",
        "RepeatingLoader": "strata.batches:RepeatingLoader",
        "instrument_w_nvtx": "strata.compat.script_functions:as_it_is",
        "is_initialized": "strata.compat.communication:is_initialized",
        "set_log_level_from_string": "strata.compat.script_functions:set_log_level_from_string",
        "fragment_address": "strata.compat.checkpointing:fragment_address",
    },
    "utils.groups": _GROUPS,
    "utils.logging": {
        **_LOGGING,
        **_of("strata.compat.script_functions", "get_current_level set_log_level_from_string should_log_le"),
    },
    "utils.module_utils": _PATHS,
    "utils.torch": _of("strata.compat.accelerator",
                       "is_functorch_transforming register_grad_hook required_torch_version"),
    "utils.nvtx": {"instrument_w_nvtx": "strata.compat.script_functions:as_it_is"},
    "utils.tensor_fragment": {**_STATES, "fragment_address": "strata.compat.checkpointing:fragment_address"},
    "utils.timer": _of("strata.clocks", "ThroughputTimer"),
    "utils.zero_to_fp32": {
        **_of(
            "strata.utils.zero_to_fp32",
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint",
        ),
        **_of("strata.compat.checkpointing", "get_model_state_file get_optim_files"),
    },
    "utils.z3_leaf_module": _LEAVES,
}


def _joined():
    joined = {}
    for table in (_OFFERED, CONSTANTS, REFUSED):
        for path, names in table.items():
            parts = path.split(".")
            for count in range(len(parts)):
                joined.setdefault(".".join(parts[:count]), {})  # the packages that it is in
            joined.setdefault(path, {}).update(names)
    return joined


MODULES = _joined()
