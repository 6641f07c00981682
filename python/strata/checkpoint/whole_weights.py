"""The weights as one state dict of whole tensors on the host, as ``torch.save`` takes it."""

import base64
import json
import os
from collections import OrderedDict

import torch

from .. import _C
from ..model.parameter import owner_of
from ..model.tiles import tiles_of
from ..ranks.runtime import agree_after
from ..tiles.host_copy import set_values, values_on_host

WEIGHTS = "pytorch_model.bin"  # where readers look for a whole model


def whole_state_dict(model, keep=True, with_frozen=True):
    """{name: tensor on the host}: ``model.state_dict()`` with whole parameters.

    Collective where parameters are sharded: the engine gathers one unit at a time and copies it to the host. Tensors
    that the model shares are shared in the result.

    Args:
        keep: False: take part in gathers, and return None.
        with_frozen: False leaves out parameters that need no gradient.
    """
    result, copies = OrderedDict(), {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = prefix and prefix + "."
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad or with_frozen:
                result[prefix + name] = _copy_of(parameter, copies, keep)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if keep and name not in module._non_persistent_buffers_set:
                result[prefix + name] = buffer.detach().cpu().clone()
    return result if keep else None


def _copy_of(parameter, copies, keep):
    if id(parameter) not in copies and tiles_of(parameter) is not None:
        copies[id(parameter)] = values_on_host(parameter, keep)
    if id(parameter) not in copies:
        core, index = owner_of(parameter)
        if core is not None:
            core.gather([index])
        try:
            copies[id(parameter)] = parameter.detach().cpu().clone() if keep else None
        finally:
            if core is not None:
                core.release([index], True)
    return copies[id(parameter)]


def set_whole_weights(engine, state_dict, strict=True, may_miss=()):
    """Gives the engine's model the values of a state dict. Collective; rank 0's names and values count, those of other
    ranks do not. The call checks all names and shapes before it changes a value. With ``strict`` names of ``may_miss``
    may be missing.

    Returns:
        as ``torch.nn.Module.load_state_dict``: (missing keys, unexpected keys).

    Raises:
        UsageError: names or shapes do not fit; on every rank.
    """
    from .names import state_names  # not before the first use

    parameters, buffers = state_names(engine.module)
    left = _of_rank_0(engine, state_dict, buffers)
    missing = [name for name in [*parameters, *buffers] if name not in left]
    there = [(name, p, left.pop(name)) for name, p in parameters.items() if name in left]
    for name, parameter, value in there:
        _require_shape(name, _whole_shape(parameter), value)
    for name, buffer in buffers.items():
        if name in left:
            _require_shape(name, buffer.shape, left[name])
    values = [(buffer, left.pop(name)) for name, buffer in buffers.items() if name in left]
    lost = [name for name in missing if name not in may_miss]
    if strict and (lost or left):
        raise _C.UsageError(f"the state dict does not fit the model: missing {lost[:3]}, unexpected "
                            f"{list(left)[:3]}; pass strict=False to take what fits")
    with torch.no_grad():
        for _, parameter, value in there:
            _set(parameter, value)
        for buffer, value in values:
            buffer.copy_(value)
    return torch.nn.modules.module._IncompatibleKeys(missing, list(left))


def _of_rank_0(engine, state_dict, buffers):
    """Rank 0's state dict. On other ranks tensors without memory stand for those that ``_set`` takes from rank 0."""
    first = engine.global_rank == 0
    with agree_after(engine._collectives, "loading the state dict"):
        own = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)} if first else {}
        listed = json.dumps([
            [n, list(v.shape), str(v.dtype).removeprefix("torch."), _text_of(v) if n in buffers else None]
            for n, v in own.items()
        ])  # fmt: skip
    text = engine._collectives.all_gather_text(listed)[0]
    if first:
        return own
    result = {}
    for name, shape, dtype, content in json.loads(text):
        value = torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)
        if content:
            value = torch.frombuffer(bytearray(base64.b64decode(content)), dtype=value.dtype).reshape(shape)
        result[name] = value
    return result


def _text_of(buffer):
    dense = buffer.detach().cpu().contiguous()
    return base64.b64encode(bytes(dense.view(-1).view(torch.uint8).numpy())).decode()


def _whole_shape(parameter):
    if tiles_of(parameter) is not None:
        return tiles_of(parameter).shape
    core, index = owner_of(parameter)
    return parameter.shape if core is None else torch.Size(core.full_shape(index))


def _require_shape(name, shape, value):
    if value.shape != shape:
        raise _C.UsageError(f"'{name}' has another shape: wanted {list(shape)}; found {list(value.shape)}")


def _set(parameter, value):
    if tiles_of(parameter) is not None:
        set_values(parameter, value, 0)
        return
    core, index = owner_of(parameter)
    if core is not None:
        core.gather([index])
    published = False
    try:
        parameter.copy_(value)
        if core is not None:
            core.publish([index], 0)
            published = True
    finally:
        if core is not None:
            core.release([index], not published)


def save_whole(engine, folder, filename, with_frozen):
    """Writes ``whole_state_dict`` with ``torch.save``, by rank 0. Collective. Under the name that readers of a folder
    look for, the file replaces the weights of earlier saves in any format, since readers may take those.

    Raises:
        IoError: on every rank, where rank 0 cannot write.
    """
    from .torch_file import save_whole_file  # not before the first save

    first = engine.global_rank == 0
    state_dict = whole_state_dict(engine.module, first, with_frozen)
    path = os.path.join(folder, filename)
    with agree_after(engine._collectives, f"writing '{path}'"):
        if first:
            save_whole_file(state_dict, path)
            if filename == WEIGHTS:
                _C.remove_other_weights(os.fspath(folder), {filename})
