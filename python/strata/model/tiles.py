"""The record of all parameters that are cut into tiles, of their tiles, and of the memory for tiles' gradients.

A parameter that is cut stays in its module, under its name, and is empty: users, optimizers and checkpoints see it. The
engine sees its tiles, Parameters of their own that are in no module. ``owned_parameters`` maps them."""

import math
import weakref
from operator import attrgetter
from typing import NamedTuple

import torch

from .. import _C


def write_product(target, one, other, holds=False, factor=1.0):
    """``target = factor * (one @ other)``, or with ``holds`` ``target += factor * (one @ other)``; target [m, n], one
    [m, k] and other [k, n] of its dtype. Without ``holds`` target's present values, also NaN, have no effect.

    The BLAS does it all where the three have one dtype, and on GPUs where the target is fp32 and the others have 16
    bits; the product is not rounded before the addition then. Elsewhere the product is first rounded to the dtype of
    ``one``."""
    scale = factor if holds else 1.0
    if one.dtype == target.dtype:
        target.addmm_(one, other, beta=float(holds), alpha=scale)
    elif is_widened_by_blas(one, target):
        wide = target.dtype
        torch.ops.aten.addmm.dtype_out(target, one, other, wide, beta=float(holds), alpha=scale, out=target)
    elif holds:
        target.add_((one @ other).to(target.dtype), alpha=factor)
    else:
        target.copy_(one @ other)
    if not holds and factor != 1.0:  # afterwards, to get the same bits as a gradient that is multiplied by a factor
        target.mul_(factor)


def is_widened_by_blas(one, target):
    """Whether the BLAS writes products of ``one``'s dtype in ``target``'s, which is wider."""
    return one.is_cuda and one.dtype.itemsize == 2 and target.dtype == torch.float32


class Destination:
    """The memory for a gradient; an operation writes all of ``values``, a tensor, multiplied by ``factor``, a float.
    ``holds``: bool, whether it adds to the present values; else these are undefined."""

    def __init__(self, values=None, holds=False, factor=1.0):
        self.values, self.holds, self.factor = values, holds, factor

    def add_product(self, one, other, row=None):
        """Writes or adds ``one @ other``, the gradient, or that of row ``row``."""
        write_product(self.values if row is None else self.values[row], one, other, self.holds, self.factor)

    def add(self, gradient):
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


class ProductSum:
    """A gradient that is the sum of ``count`` products, in fp32 at least. The sum is in the ``Destination``, where that
    is as wide or there is one product only; else it is in a tensor of its own until ``finish``."""

    def __init__(self, destination, count):
        self._destination, self._any, values = destination, False, destination.values
        wide = torch.promote_types(values.dtype, torch.float32)
        in_place = count == 1 or wide == values.dtype
        self._beside = None if in_place else torch.empty(values.shape, dtype=wide, device=values.device)

    def add(self, one, other):
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


class Tile:
    """Rows [begin, end) of a parameter: a context in which their values are whole on this rank. ``parameter`` is the
    torch.nn.Parameter that the engine owns for it, ``index`` its index in ``core``. ``begin``, ``end``, ``rows``: ints,
    rows of the whole parameter, and their number. ``tiles``: [this one], as of ``TileRun``."""

    def __init__(self, parameter, begin, end):
        self.parameter, self.begin, self.end, self.rows = parameter, begin, end, end - begin
        self._core, self.index = None, -1

    def bind(self, core, index):
        """Called when an engine takes the tile over, as its parameter ``index``."""
        self._core, self.index = weakref.ref(core), index

    @property
    def core(self):
        """The _C.ShardedModel that owns the tile; None: there is none, or it has ended."""
        core = None if self._core is None else self._core()
        return core if core is not None and core.alive else None

    tiles = property(lambda self: [self])
    trainable = property(attrgetter("parameter.requires_grad"))

    def left_out(self):
        """bool: whether this rank may skip a use of it that other ranks make; it has skipped it then."""
        core = self.core
        if core is None:
            return True
        if not core.gathers_alone:
            return False
        core.leave_out_tile(self.index)
        return True

    def __enter__(self):
        """Tensor [rows, ...]: its values, until the context ends. The caller must not keep a view of them."""
        core = self.core
        return self.parameter.detach() if core is None else core.begin_tile(self.index)

    def __exit__(self, kind, value, traceback):
        core = self.core
        if core is not None:
            core.end_tile(self.index)

    def give_gradient(self, gradient):
        """Passes its gradient [rows, ...], of one use, to the engine, which reduces it at once. In backward."""
        core = self.core
        if core is not None:
            core.take_gradient(self.index, gradient)
            return
        with self.gradient() as place:
            place.add(gradient)

    def gradient(self):
        """``GradientTarget``: where an operation writes its gradient, of one use, in place of ``give_gradient``."""
        return GradientTarget(self)


class TileRun:
    """``tiles``, [``Tile``], neighbours in order, whose values are always side by side in this rank's memory: a
    context, as a tile is, in which the values of all are one tensor, of rows [begin, end) of the whole parameter."""

    def __init__(self, tiles):
        self.tiles, self.begin, self.end = tiles, tiles[0].begin, tiles[-1].end
        self._core = None

    def left_out(self):
        return False

    def __enter__(self):
        self._core = self.tiles[0].core
        return self._core.begin_tiles(self.tiles[0].index, self.tiles[-1].index)

    def __exit__(self, kind, value, traceback):
        for tile in self.tiles:
            self._core.end_tile(tile.index)


class Tiles(list):
    """All tiles of one parameter, [``Tile``], in the order of its rows.

    Attributes:
        name: str, of the parameter in its model.
        shape, dtype: torch.Size and torch.dtype of the whole.
        rows, row_numel, nbytes: ints: rows, elements of a row, bytes of the whole.
        homes: [(module, name there)] that use it.
        owner: (_C.ShardedModel, index) that had sharded the whole before the engine; (None, None): it was not sharded.
        most_read: int, the most bytes that may be whole at once for a read outside its modules; None: any.
    """

    def __init__(self, name, parameter, shape, ranges, homes, most_read):
        super().__init__()
        self.name, self.shape, self.homes, self.most_read = name, torch.Size(shape), homes, most_read
        self.dtype, self._strides, self.owner = parameter.dtype, parameter.stride(), (None, None)
        self.rows, self.row_numel = self.shape[0], math.prod(self.shape[1:])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._whole = weakref.ref(parameter)
        for begin, end in ranges:
            values = parameter.data[begin:end] if parameter.numel() else parameter.data
            tile = Tile(torch.nn.Parameter(values, parameter.requires_grad), begin, end)
            tile.parameter._strata_tile = (self, tile)
            self.append(tile)

    def runs(self, dtype=None):
        """[``TileRun``] or [``Tile``]: the groups of tiles that an operation uses at once to compute with the values in
        ``dtype``; None: in their own. There is one group of all tiles where these are always in this rank's memory and
        need no conversion: one rank's weights, on its device. Else each tile is a group."""
        first, last = self[0], self[-1]
        core = first.core
        if core is None or dtype not in (None, first.parameter.dtype) or not core.lie_together(first.index, last.index):
            return self
        return [TileRun(self)]

    whole = property(lambda self: self._whole(), doc="The parameter, as users know it.")

    @property
    def device(self):
        """torch.device on which tiles are whole."""
        core = self[0].core
        return self[0].parameter.device if core is None else core.device

    anchor = property(lambda self: self[0].parameter, doc="A Parameter that stands for all tiles in autograd: "
                      "operations of the tiles depend on it.")  # fmt: skip

    def joined(self):
        """The whole, of tiles that are rows of one tensor or have memory of their own; None: they are empty."""
        parts = [tile.parameter.data for tile in self]
        if any(part.numel() == 0 for part in parts):
            return None
        first = parts[0]
        if all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts):
            return first.as_strided(self.shape, self._strides, first.storage_offset())
        return torch.cat(parts)

    def require_readable(self):
        """Raises UsageError where it is too large to be whole at once."""
        if self.most_read is not None and self.nbytes > self.most_read:
            raise _C.UsageError(
                f"'{self.name}' is used in tiles, and all of it at once is too much to gather: {self.nbytes} bytes, of "
                f"at most {self.most_read}. Use strata.iter_pieces(parameter), which gives its rows tile by tile, or "
                "strata.zero.GatheredParameters, which makes it whole on the host")


def tiles_of(parameter):
    """The ``Tiles`` of a parameter; None for one that is not cut."""
    return None if parameter is None else parameter.__dict__.get("_strata_tiles")


def tile_of(parameter):
    """(``Tiles``, ``Tile``) of a parameter that is a tile; (None, None) for others."""
    return parameter.__dict__.get("_strata_tile", (None, None))


def known_as(parameter):
    """The parameter as users know it: for a tile the whole parameter, else the same one."""
    tiles, _ = tile_of(parameter)
    return parameter if tiles is None else tiles.whole


class Part(NamedTuple):
    """Elements [first, first + numel) of a parameter, which an engine has as its parameter ``index``."""

    index: int
    first: int
    numel: int


class OwnedParameter(NamedTuple):
    """A parameter of the user's model, and its parts in an engine."""

    parameter: torch.nn.Parameter
    shape: list
    parts: list

    def cut(self, first, numel):
        """[(index in the engine, first element there, how many)] of its elements [first, first + numel)."""
        runs = []
        for part in self.parts:
            begin, end = max(first, part.first), min(first + numel, part.first + part.numel)
            if begin < end or (numel == 0 and not runs):
                runs.append((part.index, max(begin - part.first, 0), max(end - begin, 0)))
        return runs


def owned_parameters(described):
    """[``OwnedParameter``] in the order of the model's parameters; ``described``: the result of ``describe_parameters``
    from which an engine was made."""
    found = {}
    for index, (_, parameter, shape, *_rest) in enumerate(described):
        whole = known_as(parameter)
        tiles, tile = tile_of(parameter)
        first = 0 if tiles is None else tile.begin * tiles.row_numel
        entry = found.setdefault(id(whole), OwnedParameter(whole, list(shape if tiles is None else tiles.shape), []))
        entry.parts.append(Part(index, first, math.prod(shape)))
    return list(found.values())
