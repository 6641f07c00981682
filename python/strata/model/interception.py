"""Puts the engine between a model's modules, their parameters and their calls' arguments, and removes it again."""

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Mapping

import torch

from .. import _C


def _read(parameters, name, gather_released_parameter=_C.gather_released_parameter):
    """``parameters[name]`` of a ParameterDict, as torch.compile traces it: a gathered parameter ends no graph, a
    released one does, at the call that gathers it. With a third argument the interpreter keeps to the slot."""
    value = dict.__getitem__(parameters, name)
    if value is not None and value.numel() == 0:
        gather_released_parameter(parameters, value)
    return value


_C.trace_parameter_reads(_read)


class _Keeper:
    """Holds a core. Where a module with this attribute is copied or pickled, the copy has None instead."""

    def __init__(self, core):
        self.core = core

    def __reduce__(self):
        return type(None), ()


def replaced(module, name, value):
    """Puts ``value`` in place of ``module.__dict__[name]``. Returns a function that undoes this."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value

    def undo():
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before

    return undo


def intercept(core, modules):
    """Wraps the forward of every scope's module and of the model, and the ``_parameters`` of every module that owns
    sharded parameters, so that a read outside any scope gathers. The model, ``modules[0]``, keeps ``core``, which was
    made of a tree of these modules. Returns a function that undoes this."""
    undo = contextlib.ExitStack()
    undo.callback(_drop_keeper, modules[0], core)
    modules[0].__dict__["_strata_core"] = _Keeper(core)
    for scope, module_index in enumerate(core.scopes()):
        if not core.scope_needed(scope):
            continue
        module = modules[module_index]
        undo.callback(replaced(module, "forward", _C.InterceptedForward(core, scope, module.forward)))
    undo.callback(replaced(modules[0], "forward", _C.InterceptedForward(core, None, modules[0].forward)))
    for module in modules:
        if type(module._parameters) is not dict:
            module.__dict__["_parameters"] = dict(module._parameters)  # replaces that of an earlier engine or zero.Init
        own = [core.index_of(p) for p in module._parameters.values() if p is not None]
        if not any(i >= 0 and core.is_sharded(i) for i in own):
            continue
        module.__dict__["_parameters"] = _C.ParameterDict(module._parameters)
        _C.attach_parameter_dict(module.__dict__["_parameters"], core)
        undo.callback(lambda module=module: module.__dict__.update(_parameters=dict(module.__dict__["_parameters"])))
    return undo.close


def _drop_keeper(model, core):
    keeper = model.__dict__.get("_strata_core")
    if keeper is not None and keeper.core is core:  # else it belongs to a later engine
        del model.__dict__["_strata_core"]


def intercept_arguments(module, device, floating):
    """Makes ``module(...)`` and ``module.generate(...)`` accept tensors of the host, as FSDP2's root does. Returns a
    callable without arguments that undoes this.

    They copy tensors among the arguments, also within tuples, lists, dicts, other mappings (transformers'
    BatchEncoding) and dataclasses, to ``device``, that of the model's parameters (None: no copies); the host does not
    wait for the copy of a pinned tensor. ``module(...)`` casts floating tensors to the torch.dtype ``floating``, or
    None. They pass on tensors of that device and all other values, do not change the caller's objects, and raise
    UsageError for a tensor that is neither on the host nor on ``device``."""
    if device is None and floating is None:
        return lambda: None
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: moved_arguments(args, kwargs, device, floating), prepend=True, with_kwargs=True)
    generate = getattr(module, "generate", None)
    if device is None or not callable(generate):
        return handle.remove

    @functools.wraps(generate)
    def generate_there(*args, **kwargs):
        args, kwargs = moved_arguments(args, kwargs, device)
        return generate(*args, **kwargs)

    undo = contextlib.ExitStack()
    undo.callback(replaced(module, "generate", generate_there))
    undo.callback(handle.remove)
    return undo.close


def moved_arguments(args, kwargs, device, floating=None):
    """(args, kwargs) with their tensors on ``device``, as ``intercept_arguments`` changes a call."""

    def there(name, tensor):
        if device not in (None, tensor.device):
            if tensor.device.type != "cpu":
                raise _C.UsageError(
                    f"the model is on {device}, and its argument {name} has a tensor on {tensor.device}; bring the "
                    f"batch to {device}, or leave it on the host, from where the engine moves it")
            tensor = tensor.to(device, non_blocking=True)
        return tensor.to(floating) if floating is not None and tensor.is_floating_point() else tensor

    return (tuple(map_tensors(value, functools.partial(there, number)) for number, value in enumerate(args)),
            {name: map_tensors(value, functools.partial(there, f"'{name}'")) for name, value in kwargs.items()})


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
        held, put = {key: value[key] for key in value}, operator.setitem
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held, put = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}, object.__setattr__
    else:
        return value
    mapped = {key: map_tensors(item, change) for key, item in held.items()}
    changed = {key: new for key, new in mapped.items() if new is not held[key]}
    copied = copy.copy(value) if changed else value
    for key, new in changed.items():
        put(copied, key, new)
    return copied
