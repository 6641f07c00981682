"""Helpers that training scripts import from DeepSpeed's ``utils``."""

from ..batches import RepeatingLoader
from ..model.leaves import *
from ..parameter_states import *
from ..rank_logging import log_dist, logger

__all__ = sorted(name for name in globals() if not name.startswith("_"))
