"""The class ``deepspeed.DeepSpeedEngine`` in a process that has no engine.

Frameworks call ``isinstance(model, DeepSpeedEngine)`` in every job, also in those that never make an engine; this class
answers without an import of the engine.
"""

import importlib
import sys

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
    """The class of engines that ``deepspeed.initialize`` makes."""
