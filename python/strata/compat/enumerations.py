"""Enumerations of DeepSpeed, with its values: of stages, of devices, of states that can be offloaded."""

import enum


class ZeroStageEnum(int, enum.Enum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """The tiers of shards."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """The states that ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(enum.Enum):
    """The kinds of parameters under ZeRO."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
