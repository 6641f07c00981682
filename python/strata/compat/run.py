"""``python -m strata.compat.run [-m] script arguments...``: runs a script in which ``deepspeed`` is Strata.

``strata run`` starts this on every rank.
"""

import os
import runpy
import sys

from .activation import NAME, VARIABLE, activate


def main():
    """Runs the script, or with -m the module, that the command line names; returns when it ends."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments:
        sys.exit("python -m strata.compat.run: name a script, or -m and a module")
    os.environ[VARIABLE] = NAME  # processes that the script starts
    activate()
    sys.argv = arguments
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
