"""Enumerations of DeepSpeed, with its values: of stages, of places, of what may be offloaded."""

import enum


class ZeroStageEnum(int, enum.Enum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Where shards rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """What ``engine.offload_states`` takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(enum.Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
