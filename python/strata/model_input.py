"""Describes a torch.nn.Module to the engine: its parameters by name, and its tree of modules."""

import torch

from ._owner import owner_of

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def _only_looks_up(module):
    """Whether the backward of ``module`` does without its weight."""
    return type(module) is torch.nn.Embedding and "forward" not in module.__dict__ and module.max_norm is None


def describe_parameters(model, groups, born_flat=None):
    """[(name, tensor, full shape, has values, param group, owner, index there)] for every parameter of ``model``, each once.

    Args:
        model: a ``torch.nn.Module``.
        groups: {id(parameter): index of its param group}; frozen parameters need not be in it.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded.
    """
    born_flat = born_flat or {}
    entries = []
    for name, parameter in model.named_parameters():
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
    entries, modules, seen = [], [], {}

    def visit(module, path, parent):
        if id(module) in seen:  # one module in two places: planned where it is met first
            return
        seen[id(module)] = index = len(entries)
        own = [index_of[id(p)] for p in module._parameters.values() if p is not None]
        callable_ = not isinstance(module, _CONTAINERS)
        entries.append((path, type(module).__name__, parent, own, callable_, not _only_looks_up(module)))
        modules.append(module)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name, index)

    visit(model, "", -1)
    return entries, modules
