"""Parameters that are gathered, used and reduced in tiles: rows of one parameter at a time."""

import importlib

__all__ = ["TilingRule", "register_tiling"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module 'strata.tiles' has no attribute '{name}'")
    return getattr(importlib.import_module(".rules", __name__), name)
