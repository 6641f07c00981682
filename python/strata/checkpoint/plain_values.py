"""Converts values of a script to JSON and tensors, and back: a checkpoint holds no pickle.

Dicts, lists, tuples, numbers (complex ones, too), texts, bytes, None, ``argparse.Namespace``, tensors, and numpy's
numbers and arrays.
Any other value is refused, with its path in the message, since reading it back would run code."""

import argparse
import base64
import math
from importlib import metadata

import numpy
import torch

from .. import _C

_MARK = "$"  # of an object that stands for a value that JSON lacks


def written_by(**others):
    """{library: version} of the libraries that write a checkpoint."""
    try:
        version = metadata.version("strata-train")
    except metadata.PackageNotFoundError:
        version = "of a build folder"
    return {"strata": version, "torch": torch.__version__, **others}


def to_plain(value, tensors, where):
    """JSON for ``value``; its tensors are added to ``tensors`` under names of their own that begin with ``where``.
    UsageError for a value of another kind; it names the value's path. ``tensors``: {name: tensor}; None: the JSON
    itself has their bytes, which suits tensors of a few elements. ``where``: the value's name in messages."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else {_MARK: "int", "text": str(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "text": repr(float(value))}
    if isinstance(value, complex):
        return {_MARK: "complex", "parts": [to_plain(part, tensors, where) for part in (value.real, value.imag)]}
    if isinstance(value, torch.Tensor):
        return _from_tensor(value, tensors, where)
    if isinstance(value, dict):
        return _from_dict(value, tensors, where)
    if isinstance(value, (list, tuple)):
        items = [to_plain(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return {_MARK: "tuple", "items": items} if isinstance(value, tuple) else items
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, argparse.Namespace):
        return {_MARK: "namespace", "items": _from_dict(vars(value), tensors, where)}
    if type(value).__module__ == "numpy":
        return _from_numpy(value, tensors, where)
    raise _C.UsageError(f"{where}: a checkpoint keeps dicts, lists, tuples, numbers, texts, bytes and tensors; found a "
                        f"value of {type(value).__module__}.{type(value).__qualname__}; give its parts")


def from_plain(value, read):
    """The value from the JSON of ``to_plain``; ``read(name)`` gives its tensors."""
    if isinstance(value, list):
        return [from_plain(v, read) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {k: from_plain(v, read) for k, v in value.items()}
    if kind == "dict":
        return {from_plain(k, read): from_plain(v, read) for k, v in value["items"]}
    if kind == "tensor":
        return _read(value, read)
    if kind == "array":
        return _read(value, read).numpy()
    if kind == "inline tensor":
        bits = torch.frombuffer(bytearray(base64.b64decode(value["base64"])), dtype=torch.uint8)
        return bits.view(getattr(torch, value["dtype"])).view(value["shape"])
    if kind == "complex":
        return complex(*(from_plain(part, read) for part in value["parts"]))
    if kind == "tuple":
        return tuple(from_plain(v, read) for v in value["items"])
    if kind == "namespace":
        return argparse.Namespace(**from_plain(value["items"], read))
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](value["text"])
    raise _C.FormatError(f"a checkpoint holds a value of an unknown kind '{kind}'; it was written by a newer version")


def _from_tensor(tensor, tensors, where):
    if tensors is None:
        tensor = tensor.detach().cpu().contiguous()
        bits = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        return {_MARK: "inline tensor", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
                "base64": base64.b64encode(bits).decode()}
    if not tensor.is_complex():
        return {_MARK: "tensor", "name": _add(tensor, tensors, where)}
    parts = torch.view_as_real(tensor.detach().resolve_conj())  # safetensors has no complex numbers
    return {_MARK: "tensor", "name": _add(parts, tensors, where), "complex": True}


def _add(tensor, tensors, where):
    """The name under which it was added: {"a.b": ...} and {"a": {"b": ...}} are two places."""
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where}#{number}"
    tensors[name] = tensor
    return name


def _read(value, read):
    tensor = read(value["name"])
    return torch.view_as_complex(tensor) if value.get("complex") else tensor


def _from_dict(value, tensors, where):
    named = all(isinstance(k, str) for k in value) and _MARK not in value
    if named:
        return {k: to_plain(v, tensors, f"{where}.{k}") for k, v in value.items()}
    items = [[to_plain(k, tensors, f"{where} key"), to_plain(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
    return {_MARK: "dict", "items": items}


def _from_numpy(value, tensors, where):
    if isinstance(value, numpy.generic):
        return to_plain(value.item(), tensors, where)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {**_from_tensor(torch.from_numpy(numpy.ascontiguousarray(value)), tensors, where), _MARK: "array"}
    raise _C.UsageError(f"{where}: a checkpoint keeps numpy arrays of numbers; found one of {value.dtype}")
