"""Logs the memory that a process uses."""

import logging

import torch

logger = logging.getLogger("strata")

_GIB = 2**30


def see_memory_usage(message, force=False):
    """Logs ``message`` with the device's memory in use and at its peak, in GiB. Does nothing without ``force``.
    ``engine.memory_report()`` has the engine's share."""
    if not force:
        return
    if torch.cuda.is_available():
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        logger.warning("%s: %.2f GiB of the device in use, %.2f GiB at the peak", message, now / _GIB, peak / _GIB)
        torch.cuda.reset_peak_memory_stats()
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        logger.warning("%s: %.2f GiB of the host at the peak", message, peak / _GIB)


def memory_status(msg, print_rank=-1, reset_max=False):
    """``see_memory_usage(msg, force=True)``."""
    see_memory_usage(msg, force=True)


def empty_cache():
    """Gives the unused memory of torch's allocator back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
