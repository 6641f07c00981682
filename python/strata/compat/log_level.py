"""The level of Strata's logger, under DeepSpeed's names."""

import logging

from ..rank_logging import logger


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Sets the level: "debug", "info", "warning", "error" or "critical".

    Raises:
        ValueError: for another name.
    """
    (custom_logger or logger).setLevel(_level(log_level_str))


def get_current_level():
    """int: the level in force, of ``logging``."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str):
    """bool: whether the logger's level is at most the level of this name."""
    return get_current_level() <= _level(max_log_level_str)


def _level(name):
    level = logging.getLevelName(str(name).upper())
    if not isinstance(level, int):
        raise ValueError(f"'{name}' is no level of logging; wanted debug, info, warning, error or critical")
    return level
