"""Tensors without values that remember which runs of elements of which sources they are made of.

A checkpoint and a model rarely store the same tensors: experts are fused, projections split, names
differ. Libraries write such conversions as torch operations. Run on ``RangeTensor`` arguments, the same
operations give the source of every element. A conversion that only moves runs of elements becomes a list of
ranges; any other one can be computed later from its own sources alone."""

import bisect
import math
from itertools import accumulate

import torch

_RUNS_MAX = 1 << 16  # more runs than this in one tensor: computing it is cheaper than copying ranges


class RangeTensor(torch.Tensor):
    """A meta tensor with provenance. ``source``: a leaf's source, which it is the whole of; else None. ``runs``:
    [(source, first element, number of elements)], in its own row-major order; None where it has no such runs."""

    @staticmethod
    def leaf(source, shape, dtype, alike=None):
        """The whole of ``source``, any hashable object. ``alike``: a dict that remembers meta tensors between calls: to
        make one takes longer than all else here."""
        alike = {} if alike is None else alike
        key = (tuple(shape), dtype)
        if key not in alike:
            alike[key] = torch.empty(key[0], dtype=dtype, device="meta")
        return _make(alike[key], source, [(source, 0, math.prod(key[0]))], None, None)

    @staticmethod
    def of_runs(runs, shape, dtype):
        """A tensor that consists of these runs of elements of its sources."""
        return _make(torch.empty(tuple(shape), dtype=dtype, device="meta"), None, runs, None, None)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # else reading a tensor's dtype would come here
            result = _joined(args, kwargs, func) if func in _JOIN else None
            result = func(*args, **kwargs) if result is None else result
            if isinstance(result, torch.Tensor):
                runs = _runs_of([result], func, args, kwargs)
                return _make(result, None, runs and runs[0], (func, args, kwargs), None)
            if isinstance(result, (tuple, list)) and result and all(isinstance(r, torch.Tensor) for r in result):
                runs = _runs_of(result, func, args, kwargs) or [None] * len(result)
                call = (func, args, kwargs)
                return tuple(_make(r, None, runs[i], call, i) for i, r in enumerate(result))
        return result

    def sources(self):
        """Every source that it is made of, each once."""
        found, pending = {}, [self]
        while pending:
            item = pending.pop()
            if isinstance(item, RangeTensor):
                if item.source is not None:
                    found[item.source] = True
                elif item._call is None:
                    found.update((source, True) for source, _, _ in item.runs)
                else:
                    pending.extend(item._call[1:])
            elif isinstance(item, (list, tuple)):
                pending.extend(item)
            elif isinstance(item, dict):
                pending.extend(item.values())
        return list(found)

    def compute(self, read):
        """Its values; ``read(source)`` gives those of a source."""
        done = {}

        def value(item):
            if isinstance(item, RangeTensor):
                if item.source is not None:
                    if item.source not in done:
                        done[item.source] = read(item.source)
                    return done[item.source]
                if item._call is None:
                    parts = [read(source).reshape(-1)[begin : begin + numel] for source, begin, numel in item.runs]
                    return torch.cat(parts).view(item.shape)
                key = id(item._call)
                if key not in done:
                    func, args, kwargs = item._call
                    done[key] = func(*value(args), **value(kwargs))
                return done[key] if item._position is None else done[key][item._position]
            if isinstance(item, (list, tuple)):
                return type(item)(value(i) for i in item)
            return {k: value(v) for k, v in item.items()} if isinstance(item, dict) else item

        return value(self)


def _make(values, source, runs, call, position):
    tensor = torch.Tensor._make_subclass(RangeTensor, values)
    tensor.source, tensor.runs, tensor._call, tensor._position = source, runs, call, position
    return tensor


def _functions(*names):
    return {getattr(owner, n) for n in names for owner in (torch, torch.Tensor) if hasattr(owner, n)}


_SAME_ORDER = _functions("contiguous", "reshape", "view", "flatten", "squeeze", "unsqueeze", "clone", "detach", "to")
_JOIN = _functions("cat", "concat", "concatenate", "stack")
_STACK = _functions("stack")
_CUT = _functions("chunk", "split", "tensor_split", "unbind")
_UNBIND = _functions("unbind")


def _runs_of(results, func, args, kwargs):
    """The runs of every result, or None."""
    if func in _JOIN:
        return _join(results[0], args, kwargs)
    first = args[0] if args else None
    if not isinstance(first, RangeTensor) or first.runs is None:
        return None
    whole = func is torch.Tensor.__getitem__ and args[1] is Ellipsis
    if func in _SAME_ORDER or whole:
        same = results[0].dtype == first.dtype and results[0].numel() == first.numel()
        return [first.runs] if same else None
    return _cut(first, results, _dim(args, kwargs, 1 if func in _UNBIND else 2)) if func in _CUT else None


def _dim(args, kwargs, place):
    return kwargs.get("dim", args[place] if len(args) > place else 0)


def _joined(args, kwargs, func):
    """The result of ``func`` for parts whose shapes agree, or None. Torch takes long for many meta tensors."""
    parts = kwargs.get("tensors", args[0] if args else ())
    if len(parts) < 3 or len({(p.dtype, p.shape) for p in parts}) > 1 or parts[0].dim() == 0 or "out" in kwargs:
        return None
    dim, shape = _dim(args, kwargs, 1), list(parts[0].shape)
    if func in _STACK:
        shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(parts))
    else:
        shape[dim] *= len(parts)
    return torch.empty(shape, dtype=parts[0].dtype, device="meta")


def _join(result, args, kwargs):
    parts = kwargs.get("tensors", args[0] if args else ())
    if not all(isinstance(p, RangeTensor) and p.runs is not None and p.dtype == result.dtype for p in parts):
        return None
    outer = _outer(result, _dim(args, kwargs, 1))
    if outer * len(parts) > _RUNS_MAX:
        return None
    runs, takers = [], [_taker(p.runs) for p in parts]
    for i in range(outer):
        for part, take in zip(parts, takers):
            inner = part.numel() // outer if outer else 0
            take(i * inner, inner, runs)
    return [runs]


def _cut(whole, results, dim):
    outer = _outer(whole, dim)
    if outer * len(results) > _RUNS_MAX:
        return None
    take = _taker(whole.runs)
    cut, begin = [], 0
    for result in results:
        length = result.numel() // outer if outer else 0
        runs = []
        for i in range(outer):
            take(i * (whole.numel() // outer) + begin, length, runs)
        cut.append(runs)
        begin += length
    return cut


def _outer(tensor, dim):
    """The product of the dimensions before ``dim``."""
    shape = tuple(tensor.shape)
    return math.prod(shape[: dim % len(shape)])


def _taker(runs):
    """A function that adds a span of elements of ``runs`` to another list of runs, in which neighbours are merged."""
    starts = [0, *accumulate(numel for _, _, numel in runs)]

    def take(begin, numel, target):
        index = bisect.bisect_right(starts, begin) - 1
        while numel > 0:
            source, at, count = runs[index]
            skip = begin - starts[index]
            taken = min(numel, count - skip)
            if target and target[-1][0] == source and target[-1][1] + target[-1][2] == at + skip:
                target[-1] = source, target[-1][1], target[-1][2] + taken
            elif taken:
                target.append((source, at + skip, taken))
            begin += taken
            numel -= taken
            index += 1

    return take
