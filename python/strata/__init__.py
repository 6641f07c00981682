"""Strata: trains models too large for one device, sharded over ranks (ZeRO stages 0 to 3).

The entry points are those of DeepSpeed::

    import strata
    engine, optimizer, dataloader, scheduler = strata.initialize(model=model, config="ds_config.json")
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

Importing this package starts nothing: no process group, no device, no threads. What not every script uses is
imported when it is first asked for.
"""

import importlib

from . import schedule
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
from .command_line import add_config_arguments
from .engine import Engine
from .initialize import initialize
from .optimizer import ShardedOptimizer
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
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "load_weights",
    "memory_forecast",
    "ops",
    "schedule",
    "utils",
    "zero",
]

_FIRST_ASKED_FOR = {
    "load_pretrained": "pretrained",
    "load_weights": "pretrained",
    "memory_forecast": "forecast",
    "ops": "ops",
    "utils": "utils",
    "zero": "zero",
}


def __getattr__(name):
    module = _FIRST_ASKED_FOR.get(name, name)
    if module not in _FIRST_ASKED_FOR.values():
        raise AttributeError(f"module 'strata' has no attribute '{name}'")
    found = importlib.import_module(f".{module}", __name__)
    return found if module == name else getattr(found, name)
