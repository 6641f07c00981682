"""Describes a torch.nn.Module to the engine: its parameters by name, and its tree of modules."""

import torch

from .ownership import owner_of

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def _only_looks_up(module):
    """Whether the backward of ``module`` does without its weight."""
    return type(module) is torch.nn.Embedding and "forward" not in module.__dict__ and module.max_norm is None


def walk(model):
    """(path, module, parent or None) of every module of ``model`` once, where it is met first, parents before children:
    the order of ``named_modules()``, whose generator a level takes its time where there are many thousand modules."""
    seen = set()
    waiting = [("", model, None)]
    while waiting:
        path, module, parent = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module, parent
        if module._modules:
            prefix = f"{path}." if path else ""
            waiting += [(prefix + name, m, module) for name, m in reversed(module._modules.items()) if m is not None]


def modules_of(model):
    """The modules of ``walk(model)``, in its order: names take half of the time."""
    seen = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if module._modules:
            waiting += [m for m in reversed(module._modules.values()) if m is not None]


def parameters_of(model):
    """Every parameter of ``model`` once, in the order of ``model.parameters()``."""
    found = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def named_parameters(model):
    """(name, parameter) of every parameter of ``model`` once, as ``model.named_parameters()`` gives them."""
    seen = set()
    for path, module, _ in walk(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def describe_parameters(model, groups, born_flat=None):
    """[(name, tensor, full shape, has values, param group, owner, index there)] for every parameter of ``model``, each once.

    Args:
        model: a ``torch.nn.Module``.
        groups: {id(parameter): index of its param group}; frozen parameters need not be in it.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded.
    """
    born_flat = born_flat or {}
    entries = []
    for name, parameter in named_parameters(model):
        owner, owner_index = owner_of(parameter)
        shape = list(parameter.shape)
        if owner is not None:
            shape = list(owner.full_shape(owner_index))
        elif id(parameter) in born_flat:
            shape = list(born_flat[id(parameter)])
        has_values = id(parameter) not in born_flat
        entries.append((name, parameter, shape, has_values, groups.get(id(parameter), 0), owner, owner_index or 0))
    return entries


def describe_modules(model, parameters):
    """([(path, class name, parent, own parameters, callable, read in backward)], [module]), parents before children."""
    index_of = {id(entry[1]): i for i, entry in enumerate(parameters)}
    entries, modules, number_of = [], [], {id(None): -1}
    for path, module, parent in walk(model):
        own = [index_of[id(p)] for p in module._parameters.values() if p is not None]
        callable_ = not isinstance(module, _CONTAINERS)
        entries.append((path, type(module).__name__, number_of[id(parent)], own, callable_, not _only_looks_up(module)))
        number_of[id(module)] = len(modules)
        modules.append(module)
    return entries, modules
