"""Translates torch's operators to steps of a recipe (_C.Recipe): tables, and the regions of views."""

import math
from typing import NamedTuple

import torch

aten = torch.ops.aten

KEPT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANDOM = ("uniform", "normal")
_DENSE = (None, torch.contiguous_format, torch.preserve_format)


class Made(NamedTuple):
    """A tensor that an operator makes: its shape, dtype and device, the step that fills it, (operation, a, b) or None,
    and the generator of its random numbers."""

    shape: tuple
    dtype: torch.dtype
    device: torch.device
    step: tuple | None
    generator: torch.Generator | None


# operator: (where its shape is: "size", "like" or "new"; step, or how many of the arguments after the shape fill it)
_FACTORIES = {
    aten.empty: ("size", None),
    aten.zeros: ("size", ("fill", 0.0, 0.0)),
    aten.ones: ("size", ("fill", 1.0, 0.0)),
    aten.full: ("size", 1),
    aten.rand: ("size", ("uniform", 0.0, 1.0)),
    aten.randn: ("size", ("normal", 0.0, 1.0)),
    aten.empty_like: ("like", None),
    aten.zeros_like: ("like", ("fill", 0.0, 0.0)),
    aten.ones_like: ("like", ("fill", 1.0, 0.0)),
    aten.full_like: ("like", 1),
    aten.rand_like: ("like", ("uniform", 0.0, 1.0)),
    aten.randn_like: ("like", ("normal", 0.0, 1.0)),
    aten.new_empty: ("new", None),
    aten.new_zeros: ("new", ("fill", 0.0, 0.0)),
    aten.new_ones: ("new", ("fill", 1.0, 0.0)),
    aten.new_full: ("new", 1),
}

# These operators read no value of their arguments.
READ_NOTHING = {packet for packet, (where, _) in _FACTORIES.items() if where != "size"} | {aten.is_pinned}


def made_by(func, args, kwargs):
    """``Made``, or None where ``func`` makes no dense floating tensor of a kind that recipes have."""
    if func is aten.normal.float_float:
        mean, std, shape = args[:3]
        step, source, default = ("normal", float(mean), float(std)), None, torch.get_default_dtype()
    elif func.overloadpacket in _FACTORIES and "out" not in kwargs and "names" not in kwargs:
        where, step = _FACTORIES[func.overloadpacket]
        source = None if where == "size" else args[0]
        shape = args[0] if where == "size" else args[0].shape if where == "like" else args[1]
        default = torch.get_default_dtype() if source is None else source.dtype
        if step == 1:
            value = args[2] if where == "new" else args[1]
            if source is None and not isinstance(value, float):
                default = None  # of the value
            if not isinstance(value, (int, float)):
                return None
            step = ("fill", float(value), 0.0)
        if where == "like" and not source.is_contiguous():
            return None
    else:
        return None
    dtype = kwargs.get("dtype") or default
    device = torch.device(kwargs.get("device") or ("cpu" if source is None else source.device))
    dense = kwargs.get("layout") in (None, torch.strided) and kwargs.get("memory_format") in _DENSE
    if dtype not in KEPT_DTYPES or device.type not in ("cpu", "cuda") or not dense or kwargs.get("pin_memory"):
        return None
    return Made(tuple(shape), dtype, device, step, kwargs.get("generator"))


def _number(value):
    """A float; TypeError for a value that is no number."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


def _add(sign):
    return lambda other, alpha=1: [("add", sign * _number(other) * _number(alpha), 0.0)]


def _div(other, rounding_mode=None):
    if rounding_mode is not None:
        raise TypeError
    return [("divide", _number(other), 0.0)]


def _clamp(min=None, max=None):
    return [("clamp", -math.inf if min is None else _number(min), math.inf if max is None else _number(max))]


def _uniform(a=0.0, b=1.0, generator=None):
    return [("uniform", a, b)]


def _normal(mean=0.0, std=1.0, generator=None):
    return [("normal", mean, std)]


def _fill(value, non_blocking=False):
    return [("fill", _number(value), 0.0)]


def _clone(memory_format=None):
    if memory_format not in _DENSE:
        raise TypeError
    return []


_WRITES = {"zero": lambda: [("fill", 0.0, 0.0)], "fill": _fill, "copy": _fill, "uniform": _uniform, "normal": _normal}
_CHANGES = {
    "add": _add(1.0),
    "sub": _add(-1.0),
    "mul": lambda other: [("multiply", _number(other), 0.0)],
    "div": _div,
    "neg": lambda: [("multiply", -1.0, 0.0)],
    "clamp": _clamp,
    "clamp_min": lambda min: _clamp(min=min),
    "clamp_max": lambda max: _clamp(max=max),
    "erfinv": lambda: [("erfinv", 0.0, 0.0)],
}
_IN_PLACE = {f"{name}_": steps for name, steps in (_WRITES | _CHANGES).items()}
_COPYING = {**_CHANGES, "clone": _clone, "rsub": lambda other, alpha=1: [("multiply", -_number(alpha), 0.0),
                                                                         ("add", _number(other), 0.0)]}


def steps_of(func, args, kwargs):
    """([(operation, a, b)], whether ``func`` works in place): its steps on each element of its first argument; None
    where it is not element-wise."""
    name = func.overloadpacket.__name__
    in_place = name in _IN_PLACE
    steps = _IN_PLACE.get(name) or _COPYING.get(name)
    if steps is None:
        return None
    try:
        return steps(*args[1:], **kwargs), in_place
    except TypeError:  # other arguments than these, or no numbers
        return None


def region_of(tensor):
    """(first element, elements of a run, elements from run to run, runs) of a tensor in its storage, or None where the
    runs are irregular."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
    if any(stride <= 0 for _, stride in dims):
        return None
    dims.sort(key=lambda dim: -dim[1])
    merged = []
    for size, stride in dims:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if not merged or merged[-1][1] != 1:
        merged.append((1, 1))
    if len(merged) > 2:
        return None
    length = merged[-1][0]
    rows, stride = merged[0] if len(merged) == 2 else (1, length)
    if tensor.numel() == 0 or stride < length:
        return None
    return tensor.storage_offset(), length, stride, rows
