"""The configuration in the form that frameworks write and read: the whole, and the section ``zero_optimization`` as an
object, with DeepSpeed's names, second names and defaults; its enumerations; functions that read single settings."""

import enum
import logging
import math
import sys
import types

import torch

from .. import _C
from ..config_source import document_of, read_config
from ..engine_settings import VALUE_NAMES, ZERO, ZERO_3, ZERO_PLUS_PLUS, EngineSettings
from ..engine_weights import STATES
from ..rank_logging import log_dist
from ..ranks.runtime import rank_and_world_size
from .names import LEAVES


def settings_of(document):
    """The dict for Strata's parser, from one that frameworks have filled in. It lacks settings that have no effect in
    DeepSpeed either (keys with dots, an infinite ``steps_per_print``), and its whole numbers are ints."""
    settings = _whole({key: value for key, value in document.items() if "." not in str(key)})
    if settings.get("steps_per_print") == math.inf:
        del settings["steps_per_print"]
    # Trainer and Accelerate write a warm-up of 0 steps for "auto" where the user sets none. DeepSpeed took 0 as 2,
    # as it does 1, up to version 0.19.5, and has refused it since.
    scheduler = settings.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    if isinstance(params, dict) and params.get("warmup_num_steps") == 0:
        params["warmup_num_steps"] = 1
        log_dist("scheduler.params.warmup_num_steps is 0, and counts as 2 steps; leave the scheduler out of the "
                 "configuration for Trainer's own without a warm-up", [0], logging.WARNING)
    return settings


def _whole(value):
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items()}
    # Frameworks compute sizes of buckets by a product.
    return int(value) if isinstance(value, float) and value >= 1e3 and math.isfinite(value) else value


class DeepSpeedConfig:
    """A configuration (dict, path or JSON text), checked, with complete batch sizes. ``mpu`` and ``mesh_device`` must
    be None. ConfigError where it is wrong.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: int.
        zero_optimization_stage: int. zero_enabled: bool, whether it is above 0.
        zero_config: ``DeepSpeedZeroConfig``.
        optimizer_params, scheduler_params: the dict ``params`` of the section as given, or None.
        gradient_clipping, gradient_allreduce_op, optimizer_name, ...: results of the engine's methods of these names.
        _param_dict: the dict.
    """

    def __init__(self, config, mpu=None, mesh_device=None):
        if mpu is not None or mesh_device is not None:
            raise _C.UsageError("DeepSpeedConfig(mpu=..., mesh_device=...): Strata cuts no model between ranks; leave "
                                "them out")
        self._param_dict = document_of(config)
        parsed = read_config(settings_of(self._param_dict))
        parsed.complete_batch(rank_and_world_size()[1])
        self.train_batch_size = parsed.train_batch_size
        self.train_micro_batch_size_per_gpu = parsed.micro_batch_size
        self.gradient_accumulation_steps = parsed.accumulation_steps
        self.zero_optimization_stage = parsed.stage
        self.zero_enabled = parsed.stage > 0
        self.zero_config = get_zero_config(self._param_dict)
        self.optimizer_params, self.scheduler_params = ((self._param_dict.get(name) or {}).get("params")
                                                        for name in ("optimizer", "scheduler"))
        self._values = EngineSettings(parsed)  # the methods of an engine about its configuration

    def __getattr__(self, name):
        if name in VALUE_NAMES and "_values" in self.__dict__:
            return getattr(self._values, name)()
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


class ZeroStageEnum(int, enum.Enum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _words(name, doc, words):
    found = enum.Enum(name, [(word, word) for word in words], type=str, module=__name__)
    found.__doc__ = doc
    return found


OffloadDeviceEnum = _words("OffloadDeviceEnum", "The tiers of shards.", ("none", "cpu", "nvme"))
OffloadStateTypeEnum = _words("OffloadStateTypeEnum", "The states that ``engine.offload_states`` moves.", STATES)
ZeroParamType = enum.Enum("ZeroParamType", "NORMAL PARTITIONED REMOTE", module=__name__)  # kinds of parameters


# --- the section ``zero_optimization`` ---


class _Section(types.SimpleNamespace):
    """A section of a configuration, whose settings are attributes. ConfigError for an unknown setting."""

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
        if "device" in values:
            values["device"] = OffloadDeviceEnum(values["device"] or "none")
        super().__init__(**values)

    def model_dump(self):
        """{name: value}, sections within as dicts."""
        return {k: v.model_dump() if isinstance(v, _Section) else v for k, v in self.__dict__.items()}

    dict = model_dump


class DeepSpeedZeroOffloadParamConfig(_Section):
    """``zero_optimization.offload_param``."""

    DEFAULTS = {"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 100_000_000,
                "max_in_cpu": 1_000_000_000, "pin_memory": True}  # fmt: skip


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """``zero_optimization.offload_optimizer``. ``pipeline``: bool, ``pipeline_read`` or ``pipeline_write``."""

    DEFAULTS = {"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "pipeline_read": False,
                "pipeline_write": False, "fast_init": False, "ratio": 1.0, "super_offload": False,
                "cpuadam_cores_perc": 0.8}  # fmt: skip

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        self.pipeline = bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_Section):
    """``zero_optimization.leaf_module``; each setting is a list of texts, or one text."""

    DEFAULTS = {"classes": LEAVES, "names": [], "name_suffixes": []}

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        for name, value in self.__dict__.items():
            self.__dict__[name] = [value] if isinstance(value, str) else list(value)


class DeepSpeedZeroConfig(_Section):
    """``zero_optimization``: ``stage`` is a ``ZeroStageEnum``, ``offload_param`` and ``offload_optimizer`` are of the
    two classes above, or None."""

    DEFAULTS = {
        "stage": 0, **ZERO, **ZERO_PLUS_PLUS, "zeropp_loco_param": None, "use_multi_rank_bucket_allreduce": True,
        "offload_param": None, "offload_optimizer": None, "zenflow": None, **ZERO_3,
        "model_persistence_threshold": sys.maxsize, "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000, "use_all_reduce_for_fetch_params": False, "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False, "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False, "override_module_apply": True, "enable_sanity_checks": False,
        "leaf_module": None, "stage3_partition_stream_chunk_size": None, "cpu_offload": None,
        "cpu_offload_params": None, "cpu_offload_param": None, "cpu_offload_use_pin_memory": None, "aio": None}
    SECOND_NAMES = {**{f"stage3_{name}": name for name in (*ZERO_3, "use_all_reduce_for_fetch_params")},
                    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"}

    def __init__(self, strict=False, **settings):
        super().__init__(strict, **settings)
        self.stage = ZeroStageEnum(self.stage)
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        pinned = {} if self.cpu_offload_use_pin_memory is None else {"pin_memory": self.cpu_offload_use_pin_memory}
        for name, old, section in (
                ("offload_param", self.cpu_offload_param or self.cpu_offload_params, DeepSpeedZeroOffloadParamConfig),
                ("offload_optimizer", self.cpu_offload, DeepSpeedZeroOffloadOptimizerConfig)):
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


def get_gradient_clipping(param_dict):
    """float: ``gradient_clipping``, 1.0 where it is not given."""
    return param_dict.get("gradient_clipping", 1.0)


def get_log_level(param_dict):
    """str or None: ``log_level``."""
    return param_dict.get("log_level")


def get_lr_from_config(config):
    """(float, ""): the first rate of a section ``scheduler``, a dict; (None, the reason) where it names none."""
    params = config.get("params")
    if "type" not in config or params is None:
        return None, "the section has no type, or no params"
    first = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(config["type"], "warmup_max_lr")
    return params.get(first), ""


def get_torch_optimizer(optimizer):
    """``optimizer`` itself where it is a torch optimizer, else the torch optimizer in its attribute ``optimizer``, or
    TypeError."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"wanted a torch.optim.Optimizer; found {type(optimizer).__name__}")
