"""The fp32 parts that the engine lends to an optimizer of the user's, as parameters of its param groups. They have a
gradient only within ``step()``: a script that clips or drops their gradients elsewhere would change none."""

import weakref
from contextlib import contextmanager

import torch

from . import _C
from .model.tiles import known_as

_gradient = torch.Tensor.grad


class LentPart(torch.nn.Parameter):
    """A part of a parameter of the model, outside ``step()``: its ``grad`` is an error while the engine has collected
    one, and None otherwise. A pickle of one is a plain ``torch.nn.Parameter``."""

    _of = None  # weak: the model's parameter

    @property
    def grad(self):
        gradient = _gradient.__get__(self)
        if gradient is None:
            self._require_nothing_collected()
        return gradient

    @grad.setter
    def grad(self, gradient):
        self._require_nothing_collected()
        _gradient.__set__(self, gradient)

    @grad.deleter
    def grad(self):
        self.grad = None

    def __reduce_ex__(self, protocol):
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    def _require_nothing_collected(self):
        parameter = None if self._of is None else self._of()
        if parameter is not None and parameter.grad is not None:
            raise _C.UsageError(
                "the param groups of this optimizer have fp32 parts of the parameters that this rank owns, whose .grad "
                "is there in step() alone; read, clip or drop the gradients of the model's own parameters "
                "(engine.module.parameters()), call engine.zero_grad(), or set gradient_clipping in the configuration"
            )


def lend_parts(states, engine):
    """Marks the parts that ``states``, a ``SegmentStates``, lends to the optimizer, each with the model's parameter."""
    for index, part in states.parts():
        part.__class__ = LentPart
        part._of = weakref.ref(known_as(engine._described[index][1]))


@contextmanager
def plain_parts(parts):
    """Context in which the parts are plain ``torch.nn.Parameter``s: torch's optimizers choose kernels by that class."""
    parts = [part for part in parts if type(part) is LentPart]
    for part in parts:
        part.__class__ = torch.nn.Parameter
    try:
        yield
    finally:
        for part in parts:
            part.__class__ = LentPart
