"""Optimizers with the names and arguments of ``deepspeed.ops``: usable alone, or given to ``strata.initialize``."""

import importlib

__all__ = ["adagrad", "adam", "lion", "muon"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module 'strata.ops' has no attribute '{name}'")
    return importlib.import_module(f".{name}", __name__)
