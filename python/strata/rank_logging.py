"""The package's logger, and messages of some ranks only."""

import logging

from .ranks.runtime import rank_and_world_size

logger = logging.getLogger("strata")


def log_dist(message, ranks=None, level=logging.INFO):
    """Logs ``message`` on the ranks of the list ``ranks``; None or [-1]: on all."""
    rank, _ = rank_and_world_size()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
