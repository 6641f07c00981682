"""Strata: trains models too large for one device, sharded over ranks (ZeRO stages 0 to 3).

The entry points are those of DeepSpeed::

    import strata
    engine, optimizer, dataloader, scheduler = strata.initialize(model=model, config="ds_config.json")
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

Importing this package starts nothing: no process group, no device, no threads.
"""

from . import zero
from ._C import (
    CommError,
    ConfigError,
    DeviceError,
    Error,
    FormatError,
    InternalError,
    IoError,
    LossScaleError,
    NumericsError,
    OutOfMemoryError,
    UsageError,
)
from .engine import Engine
from .forecast import memory_forecast
from .initialize import initialize
from .optimizer import ShardedOptimizer
from .pretrained import load_pretrained, load_weights
from .ranks.runtime import init_distributed
from .schedule import ScheduledLR

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "ConfigError",
    "DeviceError",
    "Engine",
    "Error",
    "FormatError",
    "InternalError",
    "IoError",
    "LossScaleError",
    "NumericsError",
    "OutOfMemoryError",
    "ScheduledLR",
    "ShardedOptimizer",
    "UsageError",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "load_weights",
    "memory_forecast",
    "zero",
]
