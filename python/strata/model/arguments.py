"""The arguments of a model's forward, brought to where its parameters are."""

import copy
import dataclasses
import functools
from collections.abc import Mapping

import torch

from .. import _C


def intercept_arguments(module, device, floating):
    """Makes ``module(...)`` and ``module.generate(...)`` accept tensors of the host, as FSDP2's root does.

    They copy tensors among the arguments, also within tuples, lists, dicts, other mappings (transformers'
    BatchEncoding) and dataclasses, to ``device``; the host does not wait for the copy of a pinned tensor. They pass on
    tensors of that device and all other values, and do not change the caller's objects.

    Args:
        module: the model.
        device: torch.device of its parameters; None: tensors stay where they are.
        floating: torch.dtype to which ``module(...)`` casts floating tensors; None: they keep theirs.

    Returns:
        a callable without arguments that undoes this.

    Raises:
        UsageError: from those calls, for a tensor that is neither on the host nor on ``device``.
    """

    def before_forward(module, args, kwargs):
        return moved_arguments(args, kwargs, device, floating)

    if device is None and floating is None:
        return lambda: None
    handle = module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
    generate = getattr(module, "generate", None)
    if device is None or not callable(generate):
        return handle.remove

    @functools.wraps(generate)
    def generate_there(*args, **kwargs):
        args, kwargs = moved_arguments(args, kwargs, device)
        return generate(*args, **kwargs)

    own = module.__dict__.get("generate")
    module.__dict__["generate"] = generate_there

    def undo():
        handle.remove()
        if own is None:
            module.__dict__.pop("generate", None)
        else:
            module.__dict__["generate"] = own

    return undo


def moved_arguments(args, kwargs, device, floating=None):
    """(args, kwargs) with their tensors on ``device``, as ``intercept_arguments`` changes a call."""

    def there(name, tensor):
        if device not in (None, tensor.device):
            if tensor.device.type != "cpu":
                raise _C.UsageError(
                    f"the model is on {device}, and its argument {name} has a tensor on {tensor.device}; bring the "
                    f"batch to {device}, or leave it on the host, from where the engine moves it"
                )
            tensor = tensor.to(device, non_blocking=True)
        return tensor.to(floating) if floating is not None and tensor.is_floating_point() else tensor

    return (
        tuple(map_tensors(value, functools.partial(there, number)) for number, value in enumerate(args)),
        {name: map_tensors(value, functools.partial(there, f"'{name}'")) for name, value in kwargs.items()},
    )


def map_tensors(value, change):
    """``value`` with ``change(tensor)`` in place of each tensor; itself where nothing has changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or not
    if isinstance(value, Mapping):
        return _with(value, {key: (value[key], map_tensors(value[key], change)) for key in value}, _set_item)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        pairs = {name: (old, map_tensors(old, change)) for name, old in held.items()}
        return _with(value, pairs, object.__setattr__)
    return value


def _set_item(mapping, key, value):
    mapping[key] = value


def _with(value, pairs, put):
    """A copy of ``value`` with its changed entries; ``pairs``: {key: (old, new)}."""
    changed = {where: new for where, (old, new) in pairs.items() if new is not old}
    if not changed:
        return value
    copied = copy.copy(value)
    for where, new in changed.items():
        put(copied, where, new)
    return copied
