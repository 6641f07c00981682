"""The methods of DeepSpeed's engine that return settings of its configuration: tables with a row for each method."""

import copy
import functools
import json

import torch

from .config_source import section_of, settings_of

ZERO = {  # settings of ``zero_optimization`` and DeepSpeed's defaults
    "allgather_bucket_size": 500_000_000, "allgather_partitions": True, "compute_grad_norm": True,
    "contiguous_gradients": True, "elastic_checkpoint": False, "ignore_unused_parameters": True, "legacy_stage1": False,
    "load_from_fp32_weights": True, "log_trace_cache_warnings": False, "overlap_comm": None,
    "parameter_alignment": False, "reduce_bucket_size": 500_000_000, "reduce_scatter": True,
    "round_robin_gradients": False, "save_muon_momentum_buffer_in_memory": False, "sub_group_size": 1_000_000_000}
ZERO_PLUS_PLUS = {"zero_hpz_partition_size": 1, "zero_quantized_gradients": False,
                  "zero_quantized_nontrainable_weights": False, "zero_quantized_weights": False}
ZERO_3 = {  # settings of ``zero_optimization`` that begin with "stage3_"
    "allgather_sequential": False, "gather_16bit_weights_on_model_save": False, "max_live_parameters": None,
    "max_reuse_distance": None, "model_persistence_threshold": None, "module_granularity_threshold": 0,
    "param_persistence_threshold": 100_000, "prefetch_bucket_size": 50_000_000}

# {(start of the method, start of the path): {the rest of both: default}}: the method returns the configuration's value
# at the path, honoured or a hint, or else the default where the engine has none of its own.
_VALUES = {
    ("zero_", "zero_optimization."): ZERO,
    ("zero_", "zero_optimization.stage3_"): ZERO_3,
    ("", "zero_optimization."): ZERO_PLUS_PLUS,
    ("flops_profiler_", "flops_profiler."): {
        "detailed": True, "enabled": False, "module_depth": -1, "output_file": None, "profile_step": 1,
        "recompute_fwd_factor": 0.0, "top_modules": 1},
    ("fp16_", "fp16."): {"auto_cast": False, "enabled": False},
    ("torch_autocast_", "torch_autocast."): {"enabled": False, "lower_precision_safe_modules": None},
    ("", ""): {
        "dataloader_drop_last": False, "dump_state": False, "gradient_allreduce_op": "mean", "gradient_clipping": 1.0,
        "gradient_predivide_factor": 1.0, "log_level": None, "managed_gradient_accumulation": True,
        "memory_breakdown": False, "wall_clock_breakdown": False, "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True}}

# {method: (path, default)}: the same for methods with names of their own.
_OTHER_VALUES = {
    "optimizer_name": ("optimizer.type", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "bfloat16_enabled": ("bf16.enabled", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
    "super_offload": ("zero_optimization.offload_optimizer.super_offload", False),
    "zero_partial_offload": ("zero_optimization.offload_optimizer.ratio", 1.0),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "zero_multi_rank_bucket_allreduce": ("zero_optimization.use_multi_rank_bucket_allreduce", True),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False)}

# (DeepSpeed's value for "off", methods about features that the configuration must leave off).
_OFF = (
    (False, "amp_enabled autotuning_enabled autotuning_profile_model_info compile_autosp compile_autotp "
            "compile_zero_optimization_stage curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled "
            "is_deepcompile_active is_deepcompile_enabled random_ltd_enabled uses_parallelization_pass_only"),
    (0, "autotp_size get_model_parallel_rank get_tensor_parallel_rank"),
    (5, "autotuning_end_profile_step"), ("throughput", "autotuning_metric"), (3, "autotuning_start_profile_step"),
    ({"enabled": False}, "curriculum_learning_config data_efficiency_config data_sampling_config random_ltd_config"),
    ([], "get_compile_time"),
    (None, "get_sequence_parallel_group swap_tensor_config tensor_parallel_config zenflow_config"),
    ("autotuning_metric.json", "autotuning_metric_path"),
    ("autotuning_model_info.json", "autotuning_model_info_path"))

_ELEMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _tag_validation(settings):
    return settings._configured("checkpoint.tag_validation", "Warn").lower()


def _place(tier):
    return None if tier == "device" else {"device": {"host": "cpu"}.get(tier, tier)}


def _scale_args(settings):
    return {"init_scale": settings.initial_dynamic_scale(),
            "scale_window": settings._configured("fp16.loss_scale_window", 1000),
            "delayed_shift": settings._configured("fp16.hysteresis", 2),
            "consecutive_hysteresis": settings._configured("fp16.consecutive_hysteresis", False),
            "min_scale": settings._configured("fp16.min_loss_scale", 1)}


# (method, its documentation, function of the ``EngineSettings``).
_COMPUTED = (
    ("zero_optimization_stage", "int, 0 to 3.", lambda s: s._config.stage),
    ("zero_optimization", "bool: whether anything is sharded (stage 1 to 3).", lambda s: s._config.stage > 0),
    ("zero_optimization_partition_gradients", "bool: whether gradients are sharded by the stage (2, 3).",
     lambda s: s._config.stage >= 2),
    ("zero_optimization_partition_weights", "bool: whether parameters are sharded (stage 3).",
     lambda s: s._config.stage >= 3),
    ("zero_offload_optimizer", '{"device": "cpu" or "nvme"}: the place of the optimizer\'s states; None: the device.',
     lambda s: _place(s._config.optimizer_tier)),
    ("zero_offload_param", '{"device": "cpu" or "nvme"}: the place of the parameters\' shards; None: the device.',
     lambda s: _place(s._config.param_tier)),
    *((name, "bool: whether the optimizer's states are in host memory, or are staged there.",
       lambda s: s._config.optimizer_tier != "device") for name in ("zero_cpu_offload", "zero_use_cpu_optimizer")),
    ("zero_nvme_offload_optimizer", "bool: whether the optimizer's states are on a drive.",
     lambda s: s._config.optimizer_tier == "nvme"),
    ("optimizer_params", "{name: value}: ``optimizer.params`` of the configuration with its defaults; None without an "
     "optimizer.", lambda s: s._params_of("optimizer")),
    ("scheduler_params", "{name: value}: ``scheduler.params`` of the configuration with its defaults; None without a "
     "scheduler.", lambda s: s._params_of("scheduler")),
    ("steps_per_print", "int or None: steps between two lines of progress.", lambda s: s._config.steps_per_print),
    ("torch_autocast_dtype", "torch.dtype of ``torch_autocast.dtype``; None where forward is not within autocast.",
     lambda s: s._config.autocast_dtype),
    ("get_data_types", "(torch.dtype that parameters compute in, torch.dtype in which gradients accumulate). The first "
     "is float32 where each parameter keeps its own dtype.",
     lambda s: (getattr(torch, s._config.dtype or "float32"), s._config.grad_accum_dtype)),
    ("dynamic_loss_scale", "bool: whether the loss scale adapts.",
     lambda s: s.fp16_enabled() and s._value_at("fp16.loss_scale") == 0.0),
    ("initial_dynamic_scale", "int: the first loss scale of fp16.",
     lambda s: 2 ** int(s._configured("fp16.initial_scale_power", 16))),
    ("dynamic_loss_scale_args", "{name: value}: how fp16's loss scale adapts, by DeepSpeed's names.", _scale_args),
    ("postscale_gradients", "bool: the opposite of ``prescale_gradients``, which has no effect.",
     lambda s: not s._configured("prescale_gradients", False)),
    ("checkpoint_tag_validation_enabled", "bool: whether ``checkpoint.tag_validation`` is not \"Ignore\". Different "
     "tags are an error in any case.", lambda s: _tag_validation(s) != "ignore"),
    ("checkpoint_tag_validation_fail", "bool: whether ``checkpoint.tag_validation`` is \"Fail\". Different tags are an "
     "error in any case.", lambda s: _tag_validation(s) == "fail"),
    ("checkpoint_writer_enabled", "bool: whether the configuration has a section ``checkpoint.writer``, which has no "
     "effect.", lambda s: any(path.startswith("checkpoint.writer.") for path in s._config.hint_values)),
    ("aio_config", "{name: value}: the section ``aio``, with its defaults.", lambda s: s._section("aio")))

_PATHS = {method + name: (path + name, default)
          for (method, path), defaults in _VALUES.items() for name, default in defaults.items()} | _OTHER_VALUES
VALUE_NAMES = frozenset(_PATHS)


class EngineSettings:
    """The part of ``Engine`` that returns settings of its _C.Config: the getters of the tables above, and those that
    compute their value."""

    def __init__(self, config):
        super().__init__()
        self._config = config

    @functools.cached_property
    def _texts(self):
        """{path: JSON} of all honoured settings."""
        return settings_of(self._config) | self._config.shown

    def _value_at(self, path):
        """The canonical value of an honoured setting; None where it is not given and has no default."""
        return json.loads(self._texts.get(path, "null"))

    def _configured(self, path, default):
        value = self._value_at(path)
        if value is None and path in self._config.hint_values:
            value = json.loads(self._config.hint_values[path])
        return default if value is None else value

    def _section(self, path):
        """{name: value} of all honoured settings below ``path``."""
        return section_of(self._texts, path)

    communication_data_type = property(lambda self: _ELEMENT_TYPES[self._value_at("communication_data_type") or "fp32"],
                                       doc="torch.dtype in which gradients travel between ranks.")

    def _params_of(self, section):
        if self._value_at(f"{section}.type") is None:
            return None
        return {**(self._value_at(f"{section}.params") or {}), **self._section(f"{section}.params")}


def _add_getter(name, doc, function, *arguments):
    def value(self):
        return function(self, *arguments)

    value.__name__, value.__doc__ = name, doc
    setattr(EngineSettings, name, value)


for _name, (_path, _default) in _PATHS.items():
    _add_getter(_name, f"``{_path}`` of the configuration; {_default!r} where it says nothing.",
                EngineSettings._configured, _path, _default)
for _default, _names in _OFF:
    for _name in _names.split():
        _add_getter(_name, f"{_default!r}: the feature is not offered.", lambda _, off: copy.copy(off), _default)
for _row in _COMPUTED:
    _add_getter(*_row)
