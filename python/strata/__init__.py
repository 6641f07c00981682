"""Strata: trains models too large for one device, sharded over ranks (ZeRO stages 0 to 3).

The entry points are those of DeepSpeed::

    import strata
    engine, optimizer, dataloader, scheduler = strata.initialize(model=model, config="ds_config.json")
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

Importing this package starts nothing: no process group, no device, no threads. Torch and the engine are imported when
one of its names is first asked for, so that ``import strata.compat.deepspeed`` costs nothing before other imports."""

import importlib

__version__ = "0.1.0"

_NAMES = {  # module: the names that it has
    "_C": "CommError ConfigError DeviceError Error FormatError InternalError IoError LossScaleError NumericsError "
          "OutOfMemoryError UsageError",
    "config_source": "add_config_arguments",
    "engine": "Engine",
    "forecast": "memory_forecast",
    "start": "initialize",
    "optimizer": "ShardedOptimizer",
    "pretrained": "load_pretrained load_weights",
    "ranks.runtime": "init_distributed",
    "schedule": "ScheduledLR",
    "tiles": "register_tiling",
    "tiles.host_copy": "iter_pieces",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("_C", "engine", "forecast", "nn", "ops", "pretrained", "schedule", "tiles", "utils", "zero")

__all__ = [*_HOMES, "nn", "ops", "schedule", "tiles", "utils", "zero"]


def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'strata' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})
