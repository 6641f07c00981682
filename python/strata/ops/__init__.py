"""Optimizers with the names and arguments of ``deepspeed.ops``: usable alone, or given to ``strata.initialize``."""

from . import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
