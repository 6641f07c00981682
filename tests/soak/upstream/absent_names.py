"""Names of DeepSpeed's internals that a file of tests imports at its top, where some of its tests need none of them:
they can be imported, and say so when they are used. STRATA_UPSTREAM_ABSENT has them, with ";" between them.
"""

import os

from strata.compat.names import MODULES, Refusal

INTERNALS = Refusal("internals of DeepSpeed")


def stand_in():
    """Adds them to the tables of the stand-in, once."""
    for full in filter(None, os.environ.get("STRATA_UPSTREAM_ABSENT", "").split(";")):
        parts = full.removeprefix("deepspeed.").split(".")
        for count in range(len(parts)):
            MODULES.setdefault(".".join(parts[:count]), {})
        MODULES[".".join(parts[:-1])].setdefault(parts[-1], INTERNALS)


stand_in()
