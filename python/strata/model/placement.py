"""Chooses the device that a model trains on, and moves buffers there, which the engine does not hold."""

import os

import torch

from .. import _C


def choose_device(config, tree=None):
    """``find_device(config, tree)``, made the current one."""
    device = find_device(config, tree)
    make_current(device)
    return device


def make_current(device):
    """Makes ``device`` torch's current one in this thread, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def find_device(config, tree=None):
    """The torch.device on which a model shall train.

    Args:
        config: a _C.Config.
        tree: the ModelTree of the model, whose parameters have a device; None: the model has no values yet.

    Raises:
        ConfigError: parameters are on several devices; the process cannot use the GPU of the configuration.
    """
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
            if buffer is None or buffer.device == device:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device)  # keeps the old one, and so its id
            module._buffers[name] = moved[id(buffer)][1]
