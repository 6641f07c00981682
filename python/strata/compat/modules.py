"""The modules below ``deepspeed``: each has the names of one table of ``names.py``, and finds an object at first use.

So ``import deepspeed`` imports neither torch nor the engine.
"""

import importlib
import sys

from .identity import NAME
from .names import ALIASES, MODULES
from .refusal import Refusal, refused


def is_known(name):
    """bool: whether there is a module of this full name, such as "deepspeed.runtime.zero"."""
    return _path_of(name) in MODULES


def _path_of(name):
    """The path of a module in ``names.py``: "runtime.zero.config" for "deepspeed.zero.config", "" for "deepspeed"."""
    path = name[len(NAME) + 1 :]
    for alias, target in ALIASES.items():
        if path == alias or path.startswith(alias + "."):
            return target + path[len(alias) :]
    return path


class Loader:
    """Makes one module. Two names of one module give the same object."""

    def create_module(self, spec):
        """The module that ``spec`` is another name of; None: make a new one."""
        path = _path_of(spec.name)
        return None if spec.name == _full(path) else importlib.import_module(_full(path))

    def exec_module(self, module):
        """Gives a new module its names."""
        if "__getattr__" not in module.__dict__:
            names = MODULES[_path_of(module.__name__)]
            module.__doc__ = "Strata, under the names of DeepSpeed: docs/MIGRATING.md says what differs."
            module.__file__ = importlib.import_module(".names", __package__).__file__
            module.__all__ = [name for name, target in names.items() if _is_offered(name, target)]
            module.__getattr__ = lambda name: _find(module, names, name)
            module.__dir__ = lambda: sorted({*module.__dict__, *names, *_children(module.__name__)})


def _is_offered(name, target):
    return not name.startswith("_") and not isinstance(target, Refusal)


def _full(path):
    return f"{NAME}.{path}" if path else NAME


def _children(name):
    start = _path_of(name)
    start = start and start + "."
    paths = [*MODULES, *ALIASES]
    return {path[len(start) :].split(".")[0] for path in paths if path.startswith(start) and path != ""}


def _find(module, names, name):
    """The object ``name`` of ``module``: from an entry of its table, or the module below it.

    Raises:
        AttributeError: the module has no such name.
    """
    full = f"{module.__name__}.{name}"
    if name in names:
        target = names[name]
        if full == "deepspeed.DeepSpeedEngine" and "strata.compat.engine" not in sys.modules:
            return _target("strata.compat.engine_stand_in:DeepSpeedEngine")  # the job has no engine yet
        found = refused(full, target) if isinstance(target, Refusal) else _target(target)
        module.__dict__[name] = found
        return found
    if not name.startswith("__") and is_known(full):
        return importlib.import_module(full)
    raise AttributeError(
        f"module '{module.__name__}' has no attribute '{name}': Strata, which stands in for DeepSpeed here, does not "
        "know it; docs/MIGRATING.md lists what it has"
    )


def _target(target):
    """The object of "module:name", or the module for "module:"; any other target is the object itself."""
    if not isinstance(target, str) or ":" not in target:
        return target
    home, _, name = target.partition(":")
    module = importlib.import_module(home)
    for part in name.split(".") if name else ():
        module = getattr(module, part)
    return module
