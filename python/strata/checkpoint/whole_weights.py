"""The weights as one state dict of whole tensors on the host, as ``torch.save`` takes it."""

import os
from collections import OrderedDict

import torch

from .. import _C
from ..model.ownership import owner_of
from ..ranks.joint import together


def whole_state_dict(model, keep=True, with_frozen=True):
    """{name: tensor on the host} of ``model.state_dict()``'s names, parameters that are sharded whole.

    Collective where parameters are sharded: they are gathered one unit at a time, and copied to the host. Tensors
    that the model shares are shared in the result.

    Args:
        keep: False: take part in gathers, and return None.
        with_frozen: False leaves parameters out that need no gradient.
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


def set_whole_weights(model, state_dict, strict=True):
    """Takes a state dict's values for ``model``. Collective; rank 0's values count.

    Returns:
        as ``torch.nn.Module.load_state_dict``: (missing keys, unexpected keys).

    Raises:
        UsageError: names or shapes do not fit.
    """
    left = dict(state_dict)
    missing = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = prefix and prefix + "."
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if prefix + name in left:
                _set(prefix + name, parameter, left.pop(prefix + name))
            else:
                missing.append(prefix + name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:
                continue
            if prefix + name in left:
                buffer.copy_(left.pop(prefix + name))
            else:
                missing.append(prefix + name)
    if strict and (missing or left):
        raise _C.UsageError(f"the state dict does not fit the model: missing {missing[:3]}, unexpected "
                            f"{list(left)[:3]}; pass strict=False to take what fits")
    return torch.nn.modules.module._IncompatibleKeys(missing, list(left))


def _set(name, parameter, value):
    core, index = owner_of(parameter)
    shape = parameter.shape if core is None else torch.Size(core.full_shape(index))
    if value.shape != shape:
        raise _C.UsageError(f"'{name}' has another shape: wanted {list(shape)}; found {list(value.shape)}")
    if core is not None:
        core.gather([index])
    published = False
    try:
        with torch.no_grad():
            parameter.copy_(value)
        if core is not None:
            core.publish([index], 0)
            published = True
    finally:
        if core is not None:
            core.release([index], not published)


def save_whole(engine, folder, filename, with_frozen):
    """Writes ``whole_state_dict`` with ``torch.save``, by rank 0. Collective.

    Raises:
        IoError: on every rank, where rank 0 cannot write.
    """
    first = engine.global_rank == 0
    state_dict = whole_state_dict(engine.module, first, with_frozen)
    path = os.path.join(folder, filename)
    with together(engine._collectives, f"writing '{path}'"):
        if first:
            try:
                os.makedirs(folder, exist_ok=True)
                torch.save(state_dict, path + ".part")
                os.replace(path + ".part", path)
            except OSError as error:
                raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error
