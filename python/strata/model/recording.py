"""Deferred initialization: records operators of constructors on large tensors without memory as recipes (_C.Recipe)."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from ..views import logger

aten = torch.ops.aten

KEPT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANDOM = ("uniform", "normal")
_DENSE = (None, torch.contiguous_format, torch.preserve_format)


class Made(NamedTuple):
    """A tensor that an operator makes."""

    shape: tuple
    dtype: torch.dtype
    device: torch.device
    step: tuple | None  # that fills it: (operation, a, b)
    generator: torch.Generator | None  # of its random numbers


# operator: (where its shape is: "size", "like" or "new"; step, or how many of the arguments after the shape fill it)
_FILLS = {"empty": None, "zeros": ("fill", 0.0, 0.0), "ones": ("fill", 1.0, 0.0), "full": 1,
          "rand": ("uniform", 0.0, 1.0), "randn": ("normal", 0.0, 1.0)}  # fmt: skip
_FACTORIES = {getattr(aten, form.format(name)): (where, step)
              for where, form in (("size", "{}"), ("like", "{}_like"), ("new", "new_{}"))
              for name, step in _FILLS.items() if where != "new" or "rand" not in name}

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


def _fill(value, non_blocking=False):
    return [("fill", _number(value), 0.0)]


def _clone(memory_format=None):
    if memory_format not in _DENSE:
        raise TypeError
    return []


_WRITES = {"zero": lambda: [("fill", 0.0, 0.0)], "fill": _fill, "copy": _fill,
           "uniform": lambda a=0.0, b=1.0, generator=None: [("uniform", a, b)],
           "normal": lambda mean=0.0, std=1.0, generator=None: [("normal", mean, std)]}
_CHANGES = {"add": _add(1.0), "sub": _add(-1.0), "mul": lambda other: [("multiply", _number(other), 0.0)],
            "div": _div, "neg": lambda: [("multiply", -1.0, 0.0)], "clamp": _clamp,
            "clamp_min": lambda min: _clamp(min=min), "clamp_max": lambda max: _clamp(max=max),
            "erfinv": lambda: [("erfinv", 0.0, 0.0)]}
_IN_PLACE = {f"{name}_": steps for name, steps in (_WRITES | _CHANGES).items()}
_COPYING = {**_CHANGES, "clone": _clone, "rsub": lambda other, alpha=1: [("multiply", -_number(alpha), 0.0),
                                                                         ("add", _number(other), 0.0)]}


def steps_of(func, args, kwargs):
    """([(operation, a, b)], whether ``func`` works in place): its steps on elements of its first argument; or None."""
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


_MOST_STEPS = 1000  # of one recipe: each piece goes through all of them
_TO_COPY = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
# These read memory without an operator of torch.
_DIRECT_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__,
                 torch.Tensor.__repr__, torch.Tensor.__reduce_ex__}


class DeferredTensor:
    """A ``tensor`` without memory, of which others may be views, and the ``recipe`` of its values, a _C.Recipe."""

    def __init__(self, shape, dtype, device):
        self.tensor = _C.deferred_tensor(list(shape), dtype, device)
        self.recipe = _C.Recipe()

    def is_all_of(self, tensor):
        """Whether ``tensor``, a view, has all elements in their order."""
        return tensor.numel() == self.tensor.numel() and tensor.is_contiguous()


class Recording(TorchDispatchMode):
    """While it is open, floating tensors of more than ``larger_than`` elements that constructors make get no memory.
    Operations on them that work element by element, with numbers, become their recipe (``steps_of``). Random numbers
    are drawn later, counted by element; each operation draws one number, its key, from torch's generator, so that
    ``torch.manual_seed`` decides and an operation's values depend on nothing but its place in the program.

    Any other operation, or one that reads a value, materializes the tensor first, on the host (on a GPU if a
    constructor made it there). A warning says so once for each kind of constructor and operator, if ``warns``.

    ``running``: [torch.nn.Module] whose constructors run, the innermost last; none: nothing is recorded. ``threads``,
    ``world_size``: ``strata.threads`` (or None) and the job's; they decide how many threads compute values. ``piece``:
    bytes of one copy to a GPU."""

    def __init__(self, larger_than, running, threads, world_size, piece, warns):
        super().__init__()
        self._larger_than, self._running = larger_than, running
        self._threads, self._world_size, self._piece = threads, world_size, piece
        self._warns = warns
        self._held = {}  # storage -> DeferredTensor
        self._paused = 0
        self._warned = set()
        self._direct_reads = _DirectReads(self)
        self.materialized = False  # whether a tensor was materialized since the owner cleared this

    def open(self):
        self._direct_reads.__enter__()
        self.__enter__()

    def close(self, failed):
        """Ends ``open()``, also where this raises. Materializes tensors that are in use and still without memory,
        unless the context has ``failed``."""
        self.__exit__(None, None, None)
        self._direct_reads.__exit__(None, None, None)
        self.finish(failed)

    @contextmanager
    def paused(self):
        """Context in which operators are not recorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def deferred(self, tensor):
        """The ``DeferredTensor`` whose memory ``tensor`` shares, or None."""
        return self._held.get(_C.storage_of(tensor)) if self._held else None

    def forget(self, deferred):
        """Drops an ``DeferredTensor`` whose values are in shards now."""
        self._held.pop(_C.storage_of(deferred.tensor), None)

    def finish(self, failed=False):
        """Called after the outermost constructor: materializes tensors that have references left, unless it failed."""
        try:
            for key, deferred in list(self._held.items()):
                if not failed and _C.sharers(deferred.tensor) > 1:
                    self.materialize(deferred, None)
                self._held.pop(key, None)
        finally:
            self._held.clear()

    def materialize(self, deferred, func):
        """Materializes it. ``func``: the operator that needs the values, for the message; None: there is none. After an
        OutOfMemoryError, where the host has too little free memory, the tensor has not changed."""
        tensor = deferred.tensor
        what = f"a tensor of {'x'.join(map(str, tensor.shape))} ({tensor.dtype}) of {self._maker()}"
        if func is not None:
            self._warn(what, tensor, func)
        with self.paused():
            _C.back(tensor, f"zero.Init: {what}, which {_wanted_by(func)}")
            flat = tensor.detach().view(-1)
            if tensor.device.type != "cpu":
                write_pieces(deferred, flat, self._piece, self._threads, self._world_size)
            elif len(deferred.recipe) > 0:
                deferred.recipe.write(flat, 0, self._threads, self._world_size)
        self.forget(deferred)
        self.materialized = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused or not self._running:
            return func(*args, **kwargs)
        made = made_by(func, args, kwargs)
        if made is not None and torch.Size(made.shape).numel() > self._larger_than:
            deferred = self._new(made.shape, made.dtype, made.device)
            if made.step is not None:
                self._record(deferred, deferred.tensor, [made.step], made.generator)
            return deferred.tensor.detach()
        held = self.among([*args, *kwargs.values()]) if self._held else []
        if not held or func.is_view or func.overloadpacket in READ_NOTHING:
            return func(*args, **kwargs)
        return self._operate(func, args, kwargs, held)

    def _new(self, shape, dtype, device, recipe=None):
        deferred = DeferredTensor(shape, dtype, device)
        deferred.recipe = deferred.recipe if recipe is None else recipe.copy()
        self._held[_C.storage_of(deferred.tensor)] = deferred
        return deferred

    def among(self, values):
        """[the ``DeferredTensor`` of each tensor among ``values``, which may be lists]."""
        found = {}
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                deferred = self.deferred(tensor) if isinstance(tensor, torch.Tensor) else None
                if deferred is not None:
                    found[id(deferred)] = deferred
        return list(found.values())

    def _operate(self, func, args, kwargs, held):
        own = self.deferred(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if own is not None and func is _COPY and self._copy(own, *args[:2]):
            return args[0]
        for deferred in held:
            if deferred is not own:
                self.materialize(deferred, func)
        result = None if own is None else self._elementwise(func, args, kwargs, own)
        if result is not None:
            return result
        if own is not None:
            self.materialize(own, func)
        return func(*args, **kwargs)

    def _copy(self, own, target, source):
        other = self.deferred(source)
        if other is None or other is own or not (own.is_all_of(target) and other.is_all_of(source)):
            return False
        if source.dtype not in (target.dtype, torch.float32) or target.shape != source.shape:
            return False  # a copy would round the values, or broadcast them
        own.recipe = other.recipe.copy()
        return True

    def _elementwise(self, func, args, kwargs, own):
        if func is _TO_COPY:
            return self._converted(args[0], kwargs, own)
        found = steps_of(func, args, kwargs)
        if found is None or len(own.recipe) >= _MOST_STEPS:
            return None
        steps, in_place = found
        if in_place:
            if region_of(args[0]) is None:
                return None
            func(args[0].new_empty(0), *args[1:], **kwargs)  # raises torch's error for wrong arguments
            self._record(own, args[0], steps, kwargs.get("generator"))
            return args[0]
        if not own.is_all_of(args[0]):
            return None
        copy = self._new(args[0].shape, args[0].dtype, args[0].device, own.recipe)
        self._record(copy, copy.tensor, steps, None)
        return copy.tensor.detach()

    def _converted(self, source, kwargs, own):
        dtype = kwargs.get("dtype") or source.dtype
        device = torch.device(kwargs.get("device") or source.device)
        exact = dtype == source.dtype or source.dtype == torch.float32
        if dtype not in KEPT_DTYPES or device != source.device or not exact or not own.is_all_of(source):
            return None
        return self._new(source.shape, dtype, device, own.recipe).tensor.detach()

    @staticmethod
    def _record(deferred, view, steps, generator):
        region = region_of(view)
        for op, a, b in steps:
            key = _key(generator) if op in RANDOM else 0
            deferred.recipe.add(deferred.tensor.numel(), op, a, b, key, region)

    def _maker(self):
        return f"{type(self._running[-1]).__name__}'s constructor" if self._running else "a constructor"

    def _warn(self, what, tensor, func):
        kind = (self._maker(), str(func))
        if kind in self._warned or not self._warns:
            return
        self._warned.add(kind)
        drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        logger.warning(
            "zero.Init: %s, %.2f GB, is made whole on the host, since it %s; only what sets elements one by one "
            "(normal_, uniform_, trunc_normal_, fill_, arithmetic with numbers) is replayed in pieces%s", what,
            tensor.nbytes / 1e9, _wanted_by(func),
            ". It draws from torch's generator after one number for each recorded operation: other numbers than "
            "without zero.Init" if drawn else "")


class _DirectReads(TorchFunctionMode):
    def __init__(self, recording):
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for deferred in self._recording.among(args) if func in _DIRECT_READS else ():
            self._recording.materialize(deferred, func)
        return func(*args, **(kwargs or {}))


def _wanted_by(func):
    if func is None:
        return "is in use when the constructors are over"
    return f"is read or changed by {getattr(func, 'overloadpacket', func).__name__}"


def _key(generator):
    """64 bits that no other operation has."""
    device = "cpu" if generator is None else generator.device
    return torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item()


def write_pieces(deferred, target, piece, threads, world_size):
    """Writes its values to ``target``, a dense tensor of one dimension, any dtype and device, through one piece of the
    host's memory."""
    dtype = deferred.tensor.dtype
    most = max(1, piece // dtype.itemsize)
    host = None
    for begin in range(0, target.numel(), most):
        part = target[begin : begin + most]
        if part.device.type == "cpu" and part.dtype == dtype:
            deferred.recipe.write(part, begin, threads, world_size)
            continue
        if host is None:
            host = torch.empty(min(most, target.numel()), dtype=dtype, device="cpu")
        deferred.recipe.write(host[: part.numel()], begin, threads, world_size)
        part.copy_(host[: part.numel()])
