"""Describes a torch.nn.Module to the engine: its parameters by name, its tree of modules, its device."""

import os
import time

import torch

from .. import _C
from .compiling import WRAPPED, is_one_graph, unwrapped
from .leaves import z3_leaf_module
from .parameter import owner_of, parameter_at
from .tiles import known_as, tile_of, tiles_of

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


class ModelTree:
    """The modules and parameters of a model, each once, found in one walk; it does not see later changes.

    The walk does not nest generators as ``named_modules()`` does, which is slow for many thousand modules.

    ``model``: a ``torch.nn.Module``. ``modules``: [(path, module, parent or None)], each under its first path, in the
    order of ``named_modules()``. A wrapper and the module in it have one path. ``parameters``: [(name, parameter)], as
    ``named_parameters()`` gives them; in place of one that is cut, its tiles. ``cut``: ``strata.tiles.cutting.Cut``,
    the parameters that are cut; None: there are none."""

    def __init__(self, model):
        self.model, self.cut = model, None
        self.modules, self.parameters = [], []
        seen = set()
        waiting = [("", model, None)]
        while waiting:
            path, module, parent = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            self.modules.append((path, module, parent))
            prefix = f"{path}." if path else ""
            for name, parameter in dict.items(module._parameters):  # gathers nothing
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append((prefix + name, parameter))
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    waiting.append((path if name in WRAPPED else prefix + name, child, module))


def describe_parameters(tree, groups, from_files=None, takes_unfrozen=False, rules=None):
    """[(name, tensor, full shape, has values, param group, owner, index there, tile, rule)] for every parameter of a
    ``ModelTree``, each once. The param group is -1 for a parameter that is in none. ``tile`` is None, or for a tile
    (name of the whole parameter, its shape, first element there, number of modules that use it). ``groups``:
    {id(parameter): index of its param group}; none: all are in one. ``from_files``: {id(parameter): full shape} of
    parameters that are empty until they are loaded. ``takes_unfrozen``: whether frozen parameters that are in no group
    are in the first. ``rules``: {id(parameter): (update rule, bits of its states, least elements for
    8 bits)}, as of ``native_rule``; Muon's have two more, ``Matrices.are_apart`` and ``cost``."""
    from_files = from_files or {}
    outside = -1 if groups else 0
    entries = []
    for name, parameter in tree.parameters:
        tiles, tile = tile_of(parameter)
        owner, owner_index = owner_of(parameter) if tiles is None else tiles.owner
        shape = list(parameter.shape)
        part = None
        if tiles is not None:
            shape = [tile.rows, *tiles.shape[1:]]
            part = (tiles.name, list(tiles.shape), tile.begin * tiles.row_numel, len(tiles.homes))
        elif owner is not None:
            shape = list(owner.full_shape(owner_index))
        elif id(parameter) in from_files:
            shape = list(from_files[id(parameter)])
        has_values = id(parameter) not in from_files
        is_taken = takes_unfrozen and not parameter.requires_grad
        group = groups.get(id(known_as(parameter)), 0 if is_taken else outside)
        rule = (rules or {}).get(id(known_as(parameter)))
        entries.append((name, parameter, shape, has_values, group, owner, owner_index or 0, part,
                        None if rule is None else (*rule, False, 0.0)[:5]))
    return entries


def describe_modules(tree):
    """[(path, class name, parent, own parameters, callable, read in backward, leaf)], parents before children.
    ``parent`` is an index in this list, -1 for none; own parameters are indices in ``describe_parameters(tree)``."""
    index_of = {id(parameter): i for i, (_, parameter) in enumerate(tree.parameters)}
    number_of = {id(module): i for i, (_, module, _) in enumerate(tree.modules)}
    entries = []
    for path, module, parent in tree.modules:
        own = [index_of[id(p)] for p in _own_parameters(module)]
        number = -1 if parent is None else number_of[id(parent)]
        callable_ = not isinstance(module, _CONTAINERS)
        reads = not _only_looks_up(module)
        leaf = z3_leaf_module(module) or is_one_graph(module, parent)
        entries.append((path, type(unwrapped(module)).__name__, number, own, callable_, reads, leaf))
    return entries


def _own_parameters(module):
    """The module's parameters, with tiles in place of those that are cut."""
    for parameter in dict.values(module._parameters):
        tiles = tiles_of(parameter)
        if tiles is not None:
            yield from (tile.parameter for tile in tiles)
        elif parameter is not None:
            yield parameter


def _only_looks_up(module):
    """Whether the backward of ``module`` does not read its weight."""
    if type(module) is not torch.nn.Embedding or module.max_norm is not None:
        return False
    return "forward" not in module.__dict__ or tiles_of(parameter_at(module, "weight")) is not None


def make_current(device):
    """``device``, made torch's current one in this thread, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_time(device):
    """Seconds of the host's clock, once ``device`` has done the work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def find_device(config, tree=None):
    """The torch.device on which the model of a ModelTree shall train; None: one that has no values yet. ConfigError
    where parameters are on several devices, or the process cannot use the GPU of the configuration."""
    by_device = {p.device: p for _, p in tree.parameters} if tree is not None else {}
    placed = [("", p) for p in by_device.values()]
    if len(placed) > 1 or any(device.type not in ("cpu", "cuda") for device in by_device):
        placed = tree.parameters  # an error, which names them
    return _C.choose_device(config, placed, int(os.environ.get("LOCAL_RANK", "0")))


def move_buffers(tree, device):
    """Moves every buffer to ``device``, as ``model.to(device)`` does; buffers that modules share stay shared."""
    moved = {}
    for _, module, _ in tree.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device)  # keeps the old one, and so its id
                module._buffers[name] = moved[id(buffer)][1]
