"""Which device a model trains on, and the parts of it that the engine does not hold brought there."""

import os

import torch

from .. import _C
from .model_input import modules_of, named_parameters, parameters_of


def choose_device(config, model=None):
    """The torch.device on which ``model`` shall train, made torch's current one if it is a GPU.

    Args:
        config: a _C.Config.
        model: its parameters say where it lies; None: nowhere yet.

    Raises:
        ConfigError: parameters on several devices; a GPU that is wanted and cannot be used.
    """
    by_device = {p.device: p for p in parameters_of(model)} if model is not None else {}
    placed = [("", p) for p in by_device.values()]
    if len(placed) > 1 or any(device.type not in ("cpu", "cuda") for device in by_device):
        placed = list(named_parameters(model))  # an error, which names them
    device = _C.choose_device(config, placed, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def move_buffers(model, device):
    """Brings every buffer to ``device``, as ``model.to(device)`` does; buffers that modules share stay shared."""
    moved = {}
    for module in modules_of(model):
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device)  # keeps the old one, and so its id
            module._buffers[name] = moved[id(buffer)][1]
