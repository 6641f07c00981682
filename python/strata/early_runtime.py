"""A rank's device, opened beside what needs none yet: connecting ranks, and importing a model's class."""

import logging
from typing import NamedTuple

import torch

from . import _C
from .config_source import read_config, require_monitors, shown
from .model.placement import find_device, make_current
from .rank_logging import show_logs
from .ranks.runtime import expected_world_size, rank_and_world_size, telling_the_others
from .views.start_up import require_writable_files

logger = logging.getLogger("strata")


class OpenedRuntime(NamedTuple):
    """A _C.Config, whose batch sizes may be incomplete, and the _C.Runtime that it asks for."""

    config: object
    runtime: object


def open_runtime(config):
    """Reads the configuration and opens the device that it asks for, of a model that comes from files. In any thread;
    Python's lock is free while the device is opened, and torch's current device stays as it is.

    Args:
        config: as for ``read_config``.

    Raises:
        ConfigError: the configuration is wrong, or a GPU that it asks for cannot be used.
        DeviceError, OutOfMemoryError: the device cannot be opened.
    """
    parsed = read_config(config)
    runtime = _C.Runtime(find_device(parsed), parsed.threads, expected_world_size())
    runtime.expect_values()
    return OpenedRuntime(parsed, runtime)


def take_over(opening):
    """(_C.Config with complete batch sizes, _C.Runtime), once the ranks have found each other; those that have not met
    yet learn of what failed. The device is torch's current one in this thread from now on.

    Args:
        opening: a future of ``open_runtime()``, whose errors are raised here.
    """
    rank, world_size = rank_and_world_size()
    with telling_the_others():
        config, runtime = opening.result()
        config.complete_batch(world_size)
        show_logs(shown(config, "log_level"))
        require_writable_files(config, rank)
        require_monitors(config, rank)
        make_current(runtime.device)
        return config, runtime


def warm_up(opening):
    """Loads what a first step on a GPU would load, beside a start. Never raises: what cannot be loaded now is tried
    again by the step, which says so.

    Args:
        opening: a future of ``open_runtime()``.
    """
    if opening.exception() is not None:
        return
    config, runtime = opening.result()
    if runtime.device.type != "cuda":
        return
    try:
        _C.warm_up(runtime.device, getattr(torch, config.dtype or "bfloat16"))
    except Exception as error:
        logger.debug("nothing was loaded for the first step beforehand: %s", error)
