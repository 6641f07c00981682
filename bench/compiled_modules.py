"""Bytecode of modules for the fresh processes of a bench. pip leaves it beside the packages. If there is none and none
may be written, each process compiles thousands of files first, which takes longer than everything else."""

import importlib.util
import os
import tempfile
from contextlib import contextmanager


@contextmanager
def environment(as_installed=False):
    """A copy of this process's environment, in which modules that one process has imported are compiled for the next,
    in the folder of PYTHONPYCACHEPREFIX where that is given: benches that follow each other find them there.

    Args:
        as_installed: changes nothing: modules are compiled, or not, as the packages were installed.
    """
    if as_installed:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="bytecode-") as folder:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield {"PYTHONPYCACHEPREFIX": folder, **kept}


def installed_state():
    """Whether packages here were installed with bytecode, in words."""
    found = os.path.exists(importlib.util.cache_from_source(importlib.util.find_spec("torch").origin))
    return "torch is installed with bytecode" if found else "torch is installed without bytecode"
