"""The section ``zero_optimization`` as an object, with DeepSpeed's names, second names and defaults."""

import sys

from .. import _C
from .constants import LEAVES
from .enumerations import OffloadDeviceEnum, ZeroStageEnum


class _Section:
    """A section of a configuration, whose settings are attributes.

    Raises:
        ConfigError: an unknown setting. A misspelt attribute is an AttributeError.
    """

    DEFAULTS = {}  # by attribute
    SECOND_NAMES = {}  # {name in the configuration: attribute}

    def __init__(self, strict=False, **settings):
        values = {**self.DEFAULTS}
        for name, value in settings.items():
            attribute = self.SECOND_NAMES.get(name, name)
            if attribute not in self.DEFAULTS:
                raise _C.ConfigError(f"{type(self).__name__}: unknown setting; known are {', '.join(self.DEFAULTS)}; "
                                     f"found {name}")
            if strict or value != "auto":
                values[attribute] = value
        self.__dict__.update(values)

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"

    def __eq__(self, other):
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def model_dump(self):
        """{name: value}, sections within as dicts."""
        return {k: v.model_dump() if isinstance(v, _Section) else v for k, v in self.__dict__.items()}

    dict = model_dump


class DeepSpeedZeroOffloadParamConfig(_Section):
    """``zero_optimization.offload_param``."""

    DEFAULTS = {"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 100_000_000,
                "max_in_cpu": 1_000_000_000, "pin_memory": True}  # fmt: skip

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        self.device = OffloadDeviceEnum(self.device or "none")


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """``zero_optimization.offload_optimizer``.

    Attributes:
        pipeline: bool, ``pipeline_read`` or ``pipeline_write``.
    """

    DEFAULTS = {"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "pipeline_read": False,
                "pipeline_write": False, "fast_init": False, "ratio": 1.0, "super_offload": False,
                "cpuadam_cores_perc": 0.8}  # fmt: skip

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        self.device = OffloadDeviceEnum(self.device or "none")
        self.pipeline = bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_Section):
    """``zero_optimization.leaf_module``; each setting is a list of texts, or one text."""

    DEFAULTS = {"classes": LEAVES, "names": [], "name_suffixes": []}

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        for name, value in self.__dict__.items():
            self.__dict__[name] = [value] if isinstance(value, str) else list(value)


_STAGE3 = ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
           "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
           "use_all_reduce_for_fetch_params", "allgather_sequential")  # fmt: skip


class DeepSpeedZeroConfig(_Section):
    """``zero_optimization``.

    Attributes:
        stage: ``ZeroStageEnum``.
        offload_param, offload_optimizer: of the two classes above, or None.
    """

    DEFAULTS = {
        "stage": 0, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True, "allgather_partitions": True, "allgather_bucket_size": 500_000_000,
        "overlap_comm": None, "compute_grad_norm": True, "load_from_fp32_weights": True, "elastic_checkpoint": False,
        "offload_param": None, "offload_optimizer": None, "zenflow": None, "sub_group_size": 1_000_000_000,
        "prefetch_bucket_size": 50_000_000, "param_persistence_threshold": 100_000,
        "model_persistence_threshold": sys.maxsize, "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000, "gather_16bit_weights_on_model_save": False,
        "module_granularity_threshold": 0, "use_all_reduce_for_fetch_params": False, "allgather_sequential": False,
        "ignore_unused_parameters": True, "legacy_stage1": False, "round_robin_gradients": False,
        "parameter_alignment": False, "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False, "zero_quantized_gradients": False, "zeropp_loco_param": None,
        "mics_shard_size": -1, "mics_hierarchical_params_gather": False, "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False, "override_module_apply": True, "log_trace_cache_warnings": False,
        "enable_sanity_checks": False, "save_muon_momentum_buffer_in_memory": False, "leaf_module": None,
        "stage3_partition_stream_chunk_size": None, "cpu_offload": None, "cpu_offload_params": None,
        "cpu_offload_param": None, "cpu_offload_use_pin_memory": None, "aio": None,
    }  # fmt: skip
    SECOND_NAMES = {
        **{f"stage3_{name}": name for name in _STAGE3},
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        self.stage = ZeroStageEnum(self.stage)
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        pinned = {} if self.cpu_offload_use_pin_memory is None else {"pin_memory": self.cpu_offload_use_pin_memory}
        for name, old, section in (
            ("offload_param", self.cpu_offload_param or self.cpu_offload_params, DeepSpeedZeroOffloadParamConfig),
            ("offload_optimizer", self.cpu_offload, DeepSpeedZeroOffloadOptimizerConfig),
        ):
            given = getattr(self, name)
            if given is None and old:
                given = {"device": "cpu", **pinned}
            self.__dict__[name] = section(**given) if isinstance(given, dict) else given
        leaf = self.leaf_module or {}
        self.leaf_module = DeepSpeedZeroLeafModuleConfig(**leaf) if isinstance(leaf, dict) else leaf


def get_zero_config(param_dict):
    """``DeepSpeedZeroConfig`` of a whole configuration, a dict."""
    given = param_dict.get("zero_optimization") or {}
    return DeepSpeedZeroConfig(**given) if isinstance(given, dict) else DeepSpeedZeroConfig(stage=int(given))
