"""``python -m strata.compat.run [--no_local_rank] [--module] SCRIPT ARGUMENTS...``: runs a script in which
``deepspeed`` is Strata. ``strata run`` starts this on every rank.

DeepSpeed's launcher passes ``--local_rank`` to every script. Strata passes it only to scripts whose text contains it,
since others, written for torchrun, refuse it."""

import importlib.util
import os
import re
import runpy
import sys

from . import NAME, VARIABLE
from .activation import activate

_NAMES_IT = re.compile(rb"--local[_-]rank\b")


def main():
    """Runs the script, or the module, that the command line names; returns when it ends."""
    arguments = sys.argv[1:]
    options = set()
    while arguments and arguments[0] in ("--no_local_rank", "--module"):
        options.add(arguments.pop(0))
    if not arguments:
        sys.exit("python -m strata.compat.run: name a script, or --module and a module")
    os.environ[VARIABLE] = NAME  # for processes that the script starts
    activate()
    as_module = "--module" in options
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(arguments[0]))
    if "LOCAL_RANK" in os.environ and "--no_local_rank" not in options and _names_local_rank(arguments[0], as_module):
        arguments.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _names_local_rank(script, as_module):
    spec = importlib.util.find_spec(script) if as_module else None
    path = script if spec is None else spec.origin
    try:
        with open(path, "rb") as file:
            return _NAMES_IT.search(file.read()) is not None
    except (OSError, TypeError):
        return False  # the run itself will raise the error


if __name__ == "__main__":
    main()
