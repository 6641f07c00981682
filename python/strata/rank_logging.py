"""The package's logger: the lines that a process shows by itself, and messages of some ranks only.

A program that configures logging (handlers of the root, or of "strata") gets every record, and Strata itself shows
none. In any other program rank 0 shows its records from INFO on and the other ranks show their warnings, on standard
error."""

import functools
import logging
import os
import sys
import time

from . import _C
from .ranks.runtime import rank_and_world_size
from .views import logger

_LEVELS = ("debug", "info", "warning", "error", "critical")
_VARIABLE = "STRATA_LOG_LEVEL"
_shown = None  # the _RankHandler of this process


def show_logs(level=None):
    """Shows the logger's lines, unless the program has handlers for them, now or later, or a level of its own.
    ``level``: "info" and the like, the ``log_level`` of a configuration; the environment's STRATA_LOG_LEVEL counts
    before it, and raises ConfigError where it names no level; None: "info", or as before."""
    global _shown
    if _shown is None:
        if _program_listens() or logging.lastResort is None:
            return
        _shown = _RankHandler()
    if _shown in logger.handlers:
        wanted = os.environ.get(_VARIABLE) or level
        if wanted and wanted.lower() not in _LEVELS:
            raise _C.ConfigError(f"{_VARIABLE}: wanted one of {', '.join(_LEVELS)}; found '{wanted}'")
        if wanted is not None or logger.level == logging.NOTSET:
            _shown.set_threshold(getattr(logging, (wanted or "info").upper()))


def _program_listens():
    """Whether the program has a handler for the logger's records."""
    others = [handler for handler in logger.handlers if handler is not _shown]
    return bool(others) or (logger.propagate and logging.getLogger().hasHandlers())


class _OwnLevel(int):
    """A level that Strata has set: a script's level is never the same object."""


class _RankHandler(logging.Handler):
    """Shows records on this process's standard error: by rich on a terminal. As soon as the program has handlers of its
    own, this handler removes itself and its level, so that no line comes twice."""

    def __init__(self):
        super().__init__()
        self._threshold = None
        logger.addHandler(self)
        self._filtered = [logger, logging.getLogger("strata.ranks.runtime")]  # the loggers that make records
        for each in self._filtered:
            each.addFilter(self._is_ours)

    def set_threshold(self, level):
        if logger.level == logging.NOTSET or logger.level is self._threshold:
            self._threshold = _OwnLevel(level)
            logger.setLevel(self._threshold)

    def _is_ours(self, record):
        if _program_listens():
            self._retire()
            return logger.isEnabledFor(record.levelno)
        return True

    def _retire(self):
        logger.removeHandler(self)
        for each in self._filtered:
            each.removeFilter(self._is_ours)
        if logger.level is self._threshold:
            logger.setLevel(logging.NOTSET)

    def emit(self, record):
        rank, _ = rank_and_world_size()
        if rank == 0 or record.levelno >= logging.WARNING or getattr(record, "of_this_rank", False):
            try:
                self._show(record)
            except Exception:
                self.handleError(record)

    def _show(self, record):
        if sys.stderr is not None and sys.stderr.isatty():
            self._on_terminal.emit(record)
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f" {record.levelname}"
        print(f"{when} strata{level}: {self.format(record)}", file=sys.stderr, flush=True)

    @functools.cached_property
    def _on_terminal(self):
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%X]")
        handler.setFormatter(logging.Formatter("strata: %(message)s"))
        return handler


def log_dist(message, ranks=None, level=logging.INFO):
    """Logs ``message`` on the ranks of the list ``ranks``; None or [-1]: on all."""
    show_logs()
    rank, _ = rank_and_world_size()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message, extra={"of_this_rank": True})
