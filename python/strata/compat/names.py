"""The names of each module below ``deepspeed``: {path: {name: target}}.

A target is "module:name" of an object in Strata, "module:" for a module itself, a ``Refusal``, or a value.
"""

from .constants import CONSTANTS
from .identity import VERSION
from .refused_names import REFUSED

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
    "strata.compat.groups",
    "_get_data_parallel_group _get_data_parallel_group_ranks _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_model_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
    "_get_sequence_data_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
    "_get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
    "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size",
)
_ENGINE = {"DeepSpeedEngine": "strata.compat.engine:DeepSpeedEngine"}
_CONFIG = {
    "DeepSpeedConfig": "strata.compat.start:DeepSpeedConfig",
    "DeepSpeedConfigError": "strata._C:ConfigError",
    "DeepSpeedZeroConfig": "strata.compat.zero_config:DeepSpeedZeroConfig",
    "get_gradient_clipping": "strata.compat.config_getters:get_gradient_clipping",
    "get_log_level": "strata.compat.config_getters:get_log_level",
}
_SHARDING = {
    "GatheredParameters": "strata.compat.sharding:GatheredParameters",
    "Init": "strata.compat.sharding:Init",
    "ZeroParamStatus": "strata.model.parameter:ParameterStatus",
    "ZeroParamType": "strata.compat.enumerations:ZeroParamType",
    "register_external_parameter": "strata.compat.sharding:register_external_parameter",
    "unregister_external_parameter": "strata.compat.sharding:unregister_external_parameter",
}
_TENSORS = "strata.compat.tensor_trees"
_PATHS = _of("strata.compat.module_paths", "recursive_getattr recursive_setattr")
_OFFLOAD = {"DeepSpeedZeRoOffload": "strata.compat.sharding:ParameterOffload"}
_SCALERS = _of("strata.compat.loss_scalers", "DynamicLossScaler LossScaler LossScalerBase")
_ENUMERATIONS = "strata.compat.enumerations"
_OPTIMIZERS = "strata.compat.optimizer_classes"
_VERSION = {"version": VERSION, "git_hash": None, "git_branch": None}
_MAJOR, _MINOR, _PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))

_OFFERED = {
    "": {
        **_ENGINE,
        "DeepSpeedOptimizer": f"{_OPTIMIZERS}:DeepSpeedOptimizer",
        "HAS_TRITON": False,
        "OnDevice": "strata.compat.on_device:OnDevice",
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
        "initialize": "strata.compat.start:initialize",
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
    "checkpoint": {},
    "checkpoint.utils": {
        "clone_tensors_for_torch_save": f"{_TENSORS}:clone_tensors_for_torch_save",
        "get_model_ckpt_name_for_rank": f"{_TENSORS}:get_model_ckpt_name_for_rank",
    },
    "comm": _COMM,
    "comm.comm": _COMM,
    "git_version_info": {**_VERSION, "installed_ops": {}, "compatible_ops": "strata.compat.builders:COMPATIBLE",
                         "torch_info": "strata.compat.torch_facts:TORCH_INFO"},
    "compression.helper": _PATHS,
    "launcher": {},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": "strata.compat.launching:DEEPSPEED_ENVIRONMENT_NAME"},
    "moe": {},
    "moe.utils": _of(
        "strata.compat.experts",
        "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
        "split_params_into_different_moe_groups_for_optimizer",
    ),
    "ops": {"__compatible_ops__": "strata.compat.builders:COMPATIBLE"},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": "strata.ops.adagrad:DeepSpeedCPUAdagrad"},
    "ops.adam": _of("strata.ops.adam", "DeepSpeedCPUAdam FusedAdam"),
    "ops.aio": _of("strata.compat.builders", "AsyncIOBuilder"),
    "ops.lion": _of("strata.ops.lion", "DeepSpeedCPULion FusedLion"),
    "ops.op_builder": _of(
        "strata.compat.builders",
        "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder "
        "FusedLionBuilder UtilsBuilder",
    ),
    "runtime": {},
    "runtime.activation_checkpointing": {},
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
    "runtime.fp16": {},
    "runtime.bf16_optimizer": _of(_OPTIMIZERS, "BF16_Optimizer"),
    "runtime.fp16.fused_optimizer": _of(_OPTIMIZERS, "FP16_Optimizer"),
    "runtime.fp16.loss_scaler": _SCALERS,
    "runtime.fp16.unfused_optimizer": _of(_OPTIMIZERS, "FP16_UnfusedOptimizer"),
    "runtime.lr_schedules": {
        **_of("strata.schedule", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
        "get_lr_from_config": "strata.compat.config_getters:get_lr_from_config",
        "get_torch_optimizer": "strata.compat.config_getters:get_torch_optimizer",
    },
    "runtime.utils": {
        **_of(_TENSORS, "copy_to_device move_to_device"),
        **_of("strata.compat.memory_usage", "empty_cache memory_status see_memory_usage"),
        **_of("strata.compat.norms", "clip_grad_norm_ get_global_norm get_grad_norm get_weight_norm"),
        "DummyOptim": "strata.compat.optimizer_classes:DummyOptim",
        "ensure_directory_exists": "strata.compat.tensor_trees:ensure_directory_exists",
        "set_random_seed": "strata.compat.tensor_trees:set_random_seed",
    },
    "runtime.zero": {**_SHARDING, **_OFFLOAD,
                     "unwrap_model_for_generation": "strata.compat.sharding:unwrap_model_for_generation"},
    "runtime.zero.config": {
        **_of("strata.compat.zero_config", "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig "
              "DeepSpeedZeroOffloadParamConfig get_zero_config"),
        **_of(_ENUMERATIONS, "OffloadDeviceEnum ZeroStageEnum"),
        "ZERO_OPTIMIZATION": "zero_optimization",
    },
    "runtime.zero.leaf_module_config": _of("strata.compat.zero_config", "DeepSpeedZeroLeafModuleConfig"),
    "runtime.zero.linear": {"LinearModuleForZeroStage3": "torch.nn:Linear",
                            "zero3_linear_wrap": "torch.nn.functional:linear"},
    "runtime.zero.offload_config": {
        **_of(_ENUMERATIONS, "OffloadDeviceEnum OffloadStateTypeEnum"),
        **_of("strata.compat.zero_config", "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"),
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
        "OnDevice": "strata.compat.on_device:OnDevice",
        "RepeatingLoader": "strata.batches:RepeatingLoader",
        "instrument_w_nvtx": "strata.compat.tensor_trees:as_it_is",
        "is_initialized": "strata.compat.communication:is_initialized",
        "set_log_level_from_string": "strata.compat.log_level:set_log_level_from_string",
        "fragment_address": "strata.compat.loss_scalers:fragment_address",
    },
    "utils.groups": _GROUPS,
    "utils.logging": {
        **_LOGGING,
        **_of("strata.compat.log_level", "get_current_level set_log_level_from_string should_log_le"),
    },
    "utils.module_utils": _PATHS,
    "utils.torch": _of("strata.compat.torch_facts",
                       "is_functorch_transforming register_grad_hook required_torch_version"),
    "utils.nvtx": {"instrument_w_nvtx": "strata.compat.tensor_trees:as_it_is"},
    "utils.tensor_fragment": {**_STATES, "fragment_address": "strata.compat.loss_scalers:fragment_address"},
    "utils.timer": _of("strata.clocks", "ThroughputTimer"),
    "utils.zero_to_fp32": {
        **_of(
            "strata.utils.zero_to_fp32",
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint",
        ),
        **_of("strata.compat.checkpoint_files", "get_model_state_file get_optim_files"),
    },
    "utils.z3_leaf_module": _LEAVES,
}


def _joined():
    joined = {path: dict(names) for path, names in _OFFERED.items()}
    for path, names in CONSTANTS.items():
        joined.setdefault(path, {}).update(names)
    for path, names in REFUSED.items():
        parts = path.split(".")
        for count in range(len(parts) + 1):
            joined.setdefault(".".join(parts[:count]), {})
        joined[path].update(names)
    return joined


MODULES = _joined()
