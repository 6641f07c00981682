"""Attributes by dotted paths, as DeepSpeed-Chat's scripts look for modules to replace."""

import functools


def recursive_getattr(model, module_name):
    """The attribute of ``model`` at "layers.0.up"; numbers are members of a ModuleList.

    Raises:
        AttributeError: there is none.
    """
    return functools.reduce(_member, module_name.split("."), model)


def recursive_setattr(model, module_name, module):
    """Sets the attribute of ``model`` at a path.

    Raises:
        AttributeError: a part of the path before the last does not exist.
    """
    path, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, path) if path else model, name, module)


def _member(owner, name):
    return getattr(owner, name)
