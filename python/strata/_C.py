"""Stands for the C++ engine until it is imported: the module for the installed torch then takes this module's place."""

import importlib.util
import sys

from . import torch_modules


def _load():
    version = torch_modules.installed()
    path = torch_modules.choose(version)
    import torch  # noqa: F401  its libraries: the module finds them in the process

    torch_modules.require_same(version or str(torch.__version__))
    spec = importlib.util.spec_from_file_location(__name__, path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise torch_modules.explain(error, path) from error
    return module


sys.modules[__name__] = _load()
