"""Reports of start-up and steps for people: accounts, progress, tables, and the logger of the package."""

import logging

logger = logging.getLogger("strata")
