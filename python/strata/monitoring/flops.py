"""Counts the floating-point operations of a pass by module, while torch runs its operators.

Products of matrices, convolutions and attention count, by the formulas of ``torch.utils.flop_counter``. Element-wise
operators do not, nor do kernels that torch does not know. A multiplication and an addition are two operations.
"""

import time
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _attention(query, key, value, products_of_keys, products_of_values):
    batch, heads, queries, width = query.shape
    each = 2 * batch * heads * queries * key.shape[2]
    return each * (products_of_keys * width + products_of_values * value.shape[-1])


def _attention_forward(query, key, value, *args, **kwargs):
    return _attention(query, key, value, 1, 1)


def _attention_backward(gradient, query, key, value, *args, **kwargs):
    return _attention(query, key, value, 3, 2)  # the scores again; gradients of queries and keys; of scores and values


# Attention with any number of heads of keys; the registry's own formula needs the number of heads of queries.
_FORMULAS = dict(flop_registry)
for _kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    for _suffix, _formula in (("", _attention_forward), ("_backward", _attention_backward)):
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
    """One micro-batch's forward and backward, counted.

    Attributes:
        forward_flops, backward_flops: int; None before.
        modules: {module: [forward FLOP, seconds]}, inclusive; seconds by the host's clock, which waits for the device.
    """

    def __init__(self, model, device):
        self._model, self._device = model, device
        self.forward_flops = self.backward_flops = None
        self.modules = {}
        self._open = []

    @property
    def flops(self):
        """int: FLOP of both passes; None before they are over."""
        return None if self.backward_flops is None else self.forward_flops + self.backward_flops

    @contextmanager
    def forward(self):
        """Context of the forward."""
        self.forward_flops = 0
        handles = []
        for module in self._model.modules():
            self.modules[module] = [0, 0.0]
            handles.append(module.register_forward_pre_hook(self._entered))
            handles.append(module.register_forward_hook(self._left, always_call=True))
        try:
            with _Counter(self._count_forward):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.clear()

    @contextmanager
    def backward(self):
        """Context of the backward."""
        counted = 0

        def count(flops):
            nonlocal counted
            counted += flops

        with _Counter(count):
            yield
        self.backward_flops = counted

    def _count_forward(self, flops):
        self.forward_flops += flops
        for module, _ in self._open:
            self.modules[module][0] += flops

    def _entered(self, module, args):
        self._open.append((module, self._now()))

    def _left(self, module, args, result):
        while self._open:  # a module whose forward raised has no end
            last, began = self._open.pop()
            if last is module:
                self.modules[module][1] += self._now() - began
                return

    def _now(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
