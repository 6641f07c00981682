"""The memory into which an operation writes the gradient that it computes."""

import torch

from .products import write_product


class Destination:
    """The memory for a gradient; an operation writes all of ``values``.

    Attributes:
        values: tensor.
        holds: bool, whether the gradient is added to the present values; else these are undefined.
        factor: float, a factor of the gradient.
    """

    def __init__(self, values=None, holds=False, factor=1.0):
        self.values, self.holds, self.factor = values, holds, factor

    def add_product(self, one, other, row=None):
        """Writes or adds ``one @ other``, the gradient, or that of row ``row``."""
        write_product(self.values if row is None else self.values[row], one, other, self.holds, self.factor)

    def add(self, gradient):
        """Writes or adds ``gradient``."""
        if self.holds:
            self.values.add_(gradient.to(self.values.dtype), alpha=self.factor)
            return
        self.values.copy_(gradient)
        if self.factor != 1.0:
            self.values.mul_(self.factor)

    def add_nothing(self, row=None):
        """Writes or adds zeroes where there is no gradient, or none of row ``row``."""
        if not self.holds:
            (self.values if row is None else self.values[row]).zero_()

    def sum_of(self, count):
        """A ``ProductSum`` of ``count`` products."""
        return ProductSum(self, count)


class ProductSum:
    """A gradient that is the sum of several products, in fp32 at least. The sum is in the destination, where that is as
    wide or there is one product only; else it is in a tensor of its own until ``finish``."""

    def __init__(self, destination, count):
        self._destination, self._any, values = destination, False, destination.values
        wide = torch.promote_types(values.dtype, torch.float32)
        in_place = count == 1 or wide == values.dtype
        self._beside = None if in_place else torch.empty(values.shape, dtype=wide, device=values.device)

    def add(self, one, other):
        """Adds the product ``one @ other``."""
        if self._beside is None:
            self._destination.add_product(one, other)
            self._destination.holds = True
        else:
            write_product(self._beside, one, other, self._any)
        self._any = True

    def finish(self):
        """Ends the sum, after the last product."""
        if self._beside is not None and self._any:
            self._destination.add(self._beside)
        elif not self._any:
            self._destination.add_nothing()


class GradientTarget(Destination):
    """A tile's gradient of one use, in the memory from which the engine reduces it: there is no copy. A context in
    backward, at whose end the engine reduces the gradient; no other gradient may be given within it."""

    def __init__(self, tile):
        super().__init__()
        self._tile, self._core = tile, tile.core

    def __enter__(self):
        parameter = self._tile.parameter
        if self._core is not None:
            self.values, self.holds, self.factor = self._core.begin_gradient(self._tile.index)
        else:  # a plain tensor
            self.holds = parameter.grad is not None
            if not self.holds:
                parameter.grad = torch.empty_like(parameter)
            self.values = parameter.grad
        return self

    def __exit__(self, kind, value, traceback):
        self.values = None
        if self._core is not None and kind is None:
            self._core.end_gradient(self._tile.index)
        return False
