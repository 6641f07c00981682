"""Opens a rank's device while the ranks connect and Python imports the model's class, which need no device."""

import logging
from typing import NamedTuple

import torch

from . import _C
from .config_source import read_config, require_monitors, shown
from .model.placement import find_device, make_current
from .rank_logging import show_logs
from .ranks.runtime import expected_world_size, rank_and_world_size, notifying_ranks
from .views.start_up import require_writable_files

logger = logging.getLogger("strata")


class OpenedRuntime(NamedTuple):
    """A _C.Config, whose batch sizes may be incomplete, and a _C.Runtime for it."""

    config: object
    runtime: object


def open_runtime(config):
    """Reads the configuration and opens its device, for a model that comes from files. In any thread; Python's lock is
    free while the device is opened, and torch's current device does not change.

    Args:
        config: as for ``read_config``.

    Raises:
        ConfigError: the configuration is wrong, or its GPU cannot be used.
        DeviceError, OutOfMemoryError: the device cannot be opened.
    """
    parsed = read_config(config)
    runtime = _C.Runtime(find_device(parsed), parsed.threads, expected_world_size())
    runtime.expect_values()
    return OpenedRuntime(parsed, runtime)


def take_over(opening):
    """(_C.Config with complete batch sizes, _C.Runtime), once the ranks are connected. Makes the device torch's current
    one in this thread. On an error, ranks that still wait for this one get the message.

    Args:
        opening: a future of ``open_runtime()``; this function raises its errors.
    """
    rank, world_size = rank_and_world_size()
    with notifying_ranks():
        config, runtime = opening.result()
        config.complete_batch(world_size)
        show_logs(shown(config, "log_level"))
        require_writable_files(config, rank)
        require_monitors(config, rank)
        make_current(runtime.device)
        return config, runtime


def warm_up(opening):
    """Loads the kernels of a first step on a GPU, beside a start. Never raises: the step tries to load again, and
    reports the error.

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
