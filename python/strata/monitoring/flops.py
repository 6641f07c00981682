"""Counts the floating-point operations of a pass by module, while torch runs its operators, and shows them as text.

Products of matrices, convolutions and attention count, by the formulas of ``torch.utils.flop_counter``. Element-wise
operators do not, nor do kernels that torch does not know. A multiplication and an addition are two operations."""

from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..model.model_input import device_time
from ..views.tables import Tables

_aten = torch.ops.aten


def _attention(first, products_of_keys, products_of_values, *args, **kwargs):
    """``first``: the position of the query among ``args``; key and value follow."""
    query, key, value = args[first : first + 3]
    batch, heads, queries, width = query.shape
    each = 2 * batch * heads * queries * key.shape[2]
    return each * (products_of_keys * width + products_of_values * value.shape[-1])


# Attention with any number of heads of keys; the registry's own formula needs the number of heads of queries. Backward
# computes the scores again; gradients of queries and keys; of scores and values.
_FORMULAS = dict(flop_registry)
for _kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    for _suffix, _formula in (("", partial(_attention, 0, 1, 1)), ("_backward", partial(_attention, 1, 3, 2))):
        _name = f"_scaled_dot_product_{_kind}{_suffix}"
        if hasattr(_aten, _name):
            _FORMULAS[getattr(_aten, _name)] = _formula


class _Counter(TorchDispatchMode):
    """Calls ``count(flops)`` for each operator."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self._count(formula(*args, **kwargs, out_val=result))
        return result


class PassProfile:
    """One micro-batch's forward and backward, counted. ``forward_flops``, ``backward_flops``: int; None before.
    ``modules``: {module: [forward FLOP, seconds]}, inclusive; seconds of the host, which waits for the device."""

    def __init__(self, model, device):
        self._model, self._device = model, device
        self.forward_flops = self.backward_flops = None
        self.modules = {}
        self._open = []

    flops = property(lambda self: None if self.backward_flops is None else self.forward_flops + self.backward_flops,
                     doc="int: FLOP of both passes; None before they are over.")

    @contextmanager
    def forward(self):
        self.forward_flops = 0
        with ExitStack() as undo:
            undo.callback(self._open.clear)
            for module in self._model.modules():
                self.modules[module] = [0, 0.0]
                undo.enter_context(module.register_forward_pre_hook(self._entered))
                undo.enter_context(module.register_forward_hook(self._left, always_call=True))
            with _Counter(self._count_forward):
                yield

    @contextmanager
    def backward(self):
        counted = []
        with _Counter(counted.append):
            yield
        self.backward_flops = sum(counted)

    def _count_forward(self, flops):
        self.forward_flops += flops
        for module, _ in self._open:
            self.modules[module][0] += flops

    def _entered(self, module, args):
        self._open.append((module, device_time(self._device)))

    def _left(self, module, args, result):
        while self._open:  # a module whose forward raised has no end
            last, began = self._open.pop()
            if last is module:
                self.modules[module][1] += device_time(self._device) - began
                return


_HEAD = ("parameters", "forward", "share", "time")


def profile_text(title, rows, passes, depth, top, detailed):
    """The tables as plain text, under the line ``title``. ``rows``: [(name, class, depth, parameters, forward FLOP,
    seconds)] in the model's order; the first is the model. ``passes``: (forward FLOP, backward FLOP or None) of the
    whole micro-batch. ``depth``: of the deepest modules shown; -1: all. ``top``: the number of classes that are listed
    at each depth. ``detailed``: whether every module has a row."""
    deepest = max(row[2] for row in rows)
    depth = deepest if depth < 0 else min(depth, deepest)
    tables = [_by_depth(rows, depth, top)] if top > 0 else []
    if detailed:
        tables.append([("module", "class", *_HEAD), *((f"{'  ' * at}{name}", kind, *_cells(*sums, rows[0]))
                                                      for name, kind, at, *sums in rows if at <= depth)])
    forward, backward = passes
    note = f"forward {amount(forward)}FLOP"
    if backward is not None:
        note += f", backward {amount(backward)}FLOP with what it computes again"
    return Tables(title, tables, [
        note,
        "counted: products of matrices, convolutions and attention; times are longer than in a step without a profile",
    ]).text()  # fmt: skip


def _by_depth(rows, depth, top):
    total = rows[0]
    lines = [("depth, class", "modules", *_HEAD)]
    for level in range(depth + 1):
        classes = {}
        for _, kind, at, parameters, flops, seconds in rows:
            if at == level:
                sums = classes.setdefault(kind, [0, 0, 0, 0.0])
                for index, more in enumerate((1, parameters, flops, seconds)):
                    sums[index] += more
        most = sorted(classes.items(), key=lambda entry: (-entry[1][2], -entry[1][3]))[:top]
        lines += [(f"{level}  {kind}", str(count), *_cells(*sums, total)) for kind, (count, *sums) in most]
    return lines


def _cells(parameters, flops, seconds, total):
    share = f"{flops / total[4]:.1%}" if total[4] else ""
    return amount(parameters), f"{amount(flops)}FLOP", share, f"{seconds * 1e3:.2f} ms"


def amount(number):
    """"65.50 k", "1.20 M", "12 ": a number, to stand before its unit."""
    sizes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return next((f"{number / size:.2f} {unit}" for size, unit in sizes if number >= size), f"{number:.3g} ")
