"""Makes ``deepspeed`` mean Strata in this process: for ``import``, and for queries about the distribution of that name.

This module imports the standard library alone, and changes only ``sys.meta_path``. ``import strata.compat.deepspeed``
and ``strata run`` call it. So does ``strata-compat.pth`` beside the installed package, at the start of every Python
process whose environment has ``STRATA_COMPAT=deepspeed``; launchers pass the variable to ranks. An installed DeepSpeed
does not change; this process does not see it.

Each module below ``deepspeed`` has the names of one table of ``names.py``, and finds an object at first use. So
``import deepspeed`` imports neither torch nor the engine."""

import importlib
import sys
from importlib.machinery import ModuleSpec

from . import NAME, VARIABLE, VERSION

# Each of these decides at its import whether there is a DeepSpeed, and chooses base classes and names accordingly.
_TOO_LATE = ("transformers.integrations.deepspeed", "accelerate.utils", "trl.import_utils", "lightning.fabric")


def activate():
    """Makes ``deepspeed`` mean Strata. Does nothing the second time. ImportError where DeepSpeed itself, or a framework
    that looks for it, has been imported already; the message names it."""
    if is_active():
        return
    real = sys.modules.get(NAME)
    if real is not None:
        where = getattr(real, "__file__", None) or "a module made by the program"
        raise ImportError(f"'{NAME}' cannot become Strata: DeepSpeed {getattr(real, '__version__', '')} was imported "
                          f"first, from {where}. {_ADVICE}")
    early = [name for name in _TOO_LATE if name in sys.modules]
    if early:
        raise ImportError(f"'{NAME}' cannot become Strata: '{early[0]}' was imported first, and has decided whether "
                          f"there is a DeepSpeed. {_ADVICE}")
    sys.meta_path.insert(0, Finder())


def activate_as(name):
    """``activate()`` for a value of STRATA_COMPAT; an empty one asks for nothing. ImportError for unknown ones, too."""
    if name not in ("", NAME):
        advice = f"write {VARIABLE}={NAME}, or unset it"
        raise ImportError(f"{VARIABLE}={name}: Strata stands in for '{NAME}' alone; {advice}")
    if name:
        activate()


def is_active():
    """bool: whether ``deepspeed`` means Strata in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


_ADVICE = ("Write 'import strata.compat.deepspeed' as the first line of the script; or leave the script unchanged, and "
           f"start it by 'strata run', or with {VARIABLE}={NAME} in the environment")


class Finder:
    """An entry of ``sys.meta_path`` for the modules below ``deepspeed``, which it makes, too, and the metadata of that
    distribution. Two names of one module give the same object."""

    def find_spec(self, name, path=None, target=None):
        """The spec of a module of the stand-in; None for names that are not below ``deepspeed``. ModuleNotFoundError
        for a module of DeepSpeed that the stand-in lacks."""
        if name != NAME and not name.startswith(NAME + "."):
            return None
        if not is_known(name):
            raise ModuleNotFoundError(
                f"Strata, which stands in for DeepSpeed here, has no module '{name}'; docs/MIGRATING.md lists what it "
                f"has. Unset {VARIABLE} to use DeepSpeed itself", name=name)
        return ModuleSpec(name, self, origin=__file__, is_package=True)

    def find_distributions(self, context=None):
        """[the distribution "deepspeed"], where ``context`` asks for it or for all."""
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower() == NAME:
            yield _distribution()

    def create_module(self, spec):
        """The module that ``spec`` is another name of; None: make a new one."""
        path = _path_of(spec.name)
        full = f"{NAME}.{path}" if path else NAME
        return None if spec.name == full else importlib.import_module(full)

    def exec_module(self, module):
        """Gives a new module its names."""
        if "__getattr__" not in module.__dict__:
            names = _tables().MODULES[_path_of(module.__name__)]
            module.__doc__ = "Strata, under the names of DeepSpeed: docs/MIGRATING.md says what differs."
            module.__file__ = _tables().__file__
            refusal = _tables().Refusal
            module.__all__ = [n for n, target in names.items() if n[0] != "_" and not isinstance(target, refusal)]
            module.__getattr__ = lambda name: _find(module, names, name)
            module.__dir__ = lambda: sorted({*module.__dict__, *names, *_children(module.__name__)})


def _distribution():
    import importlib.metadata

    texts = {"METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
                         "Summary: Strata under the names of DeepSpeed\n", "top_level.txt": f"{NAME}\n"}

    class Distribution(importlib.metadata.Distribution):
        """The metadata of the distribution "deepspeed", which has no files."""

        def read_text(self, filename):
            return texts.get(filename)

        def locate_file(self, path):
            return path

    return Distribution()


def is_known(name):
    """bool: whether there is a module of this full name, such as "deepspeed.runtime.zero"."""
    return _path_of(name) in _tables().MODULES


def _tables():
    """The module ``names``, which is not imported before the first use."""
    from . import names

    return names


def _path_of(name):
    """The path of a module in ``names.py``: "runtime.zero.config" for "deepspeed.zero.config", "" for "deepspeed"."""
    path = name[len(NAME) + 1 :]
    return next((target + path[len(alias) :] for alias, target in _tables().ALIASES.items()
                 if f"{path}.".startswith(f"{alias}.")), path)


def _children(name):
    start = f"{path}." if (path := _path_of(name)) else ""
    paths = [*_tables().MODULES, *_tables().ALIASES]
    return {path[len(start) :].split(".")[0] for path in paths if path.startswith(start) and path != ""}


def _find(module, names, name):
    """The object ``name`` of ``module``: from an entry of its table, or the module below it; or AttributeError."""
    full = f"{module.__name__}.{name}"
    if name in names:
        target = names[name]
        if full == "deepspeed.DeepSpeedEngine" and "strata.compat.engine" not in sys.modules:
            return DeepSpeedEngine  # the job has no engine yet
        found = _tables().refused(full, target) if isinstance(target, _tables().Refusal) else _target(target)
        module.__dict__[name] = found
        return found
    if not name.startswith("__") and is_known(full):
        return importlib.import_module(full)
    raise AttributeError(f"module '{module.__name__}' has no attribute '{name}': Strata, which stands in for DeepSpeed "
                         "here, does not know it; docs/MIGRATING.md lists what it has")


def _target(target):
    """The object of "module:name", or the module for "module:"; any other target is the object itself."""
    if not isinstance(target, str) or ":" not in target:
        return target
    home, _, name = target.partition(":")
    module = importlib.import_module(home)
    for part in name.split(".") if name else ():
        module = getattr(module, part)
    return module


_HOME = "strata.compat.engine"


class _StandIn(type):
    """Behaves as the class of engines. It imports that class for every use but ``isinstance`` and ``issubclass``."""

    def __instancecheck__(cls, instance):
        home = sys.modules.get(_HOME)
        return home is not None and isinstance(instance, home.DeepSpeedEngine)

    def __subclasscheck__(cls, other):
        home = sys.modules.get(_HOME)
        return other is cls or (home is not None and issubclass(other, home.DeepSpeedEngine))

    def __getattr__(cls, name):
        return getattr(importlib.import_module(_HOME).DeepSpeedEngine, name)

    def __setattr__(cls, name, value):
        setattr(importlib.import_module(_HOME).DeepSpeedEngine, name, value)

    def __call__(cls, *args, **kwargs):
        return importlib.import_module(_HOME).DeepSpeedEngine(*args, **kwargs)


class DeepSpeedEngine(metaclass=_StandIn):
    """The class of engines that ``deepspeed.initialize`` makes, in a process that has no engine.

    Frameworks call ``isinstance(model, DeepSpeedEngine)`` in every job, also in those that never make an engine; this
    class answers without an import of the engine."""
