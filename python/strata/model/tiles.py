"""The record of all parameters that are cut into tiles, and of their tiles.

A parameter that is cut stays in its module, under its name, and is empty: users, optimizers and checkpoints see it.
The engine sees its tiles, Parameters of their own that are in no module. ``known_parameters`` maps the one to the
other.
"""

import math
import weakref
from typing import NamedTuple

import torch

from .. import _C


class Tile:
    """Rows [begin, end) of a parameter: a context in which their values are whole on this rank.

    Attributes:
        parameter: the torch.nn.Parameter that the engine owns for it.
        begin, end: ints, rows of the whole parameter.
    """

    def __init__(self, parameter, begin, end):
        self.parameter, self.begin, self.end = parameter, begin, end
        self._core, self._index = None, -1

    def bind(self, core, index):
        """Called when an engine takes the tile over, as its parameter ``index``."""
        self._core, self._index = weakref.ref(core), index

    @property
    def core(self):
        """The _C.ShardedModel that owns the tile; None: there is none, or it has ended."""
        core = None if self._core is None else self._core()
        return core if core is not None and core.alive else None

    @property
    def index(self):
        """int: its index in ``core``."""
        return self._index

    @property
    def tiles(self):
        """[``Tile``]: this tile alone; ``TileRun`` has the same attribute."""
        return [self]

    @property
    def rows(self):
        """int."""
        return self.end - self.begin

    @property
    def trainable(self):
        """bool."""
        return self.parameter.requires_grad

    def left_out(self):
        """bool: whether this rank may skip a use of it that other ranks make; it has skipped it then."""
        core = self.core
        if core is None:
            return True
        if not core.gathers_alone:
            return False
        core.leave_out_tile(self._index)
        return True

    def __enter__(self):
        """Tensor [rows, ...]: its values, until the context ends. The caller must not keep a view of them."""
        core = self.core
        return self.parameter.detach() if core is None else core.begin_tile(self._index)

    def __exit__(self, kind, value, traceback):
        core = self.core
        if core is not None:
            core.end_tile(self._index)
        return False

    def give_gradient(self, gradient):
        """Passes its gradient [rows, ...], of one use, to the engine, which reduces it at once. In backward."""
        core = self.core
        if core is not None:
            core.take_gradient(self._index, gradient)
            return
        with self.gradient() as place:
            place.add(gradient)

    def gradient(self):
        """``GradientTarget``: where an operation writes its gradient, of one use, in place of ``give_gradient``."""
        from .gradient_target import GradientTarget  # not before there are tiles

        return GradientTarget(self)


class TileRun:
    """Tiles whose values are always side by side in this rank's memory: a context, as a tile is, in which the values of
    all are one tensor.

    Attributes:
        tiles: [``Tile``], in order; neighbours.
        begin, end: ints, rows of the whole parameter.
    """

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
        return False


class Tiles:
    """All tiles of one parameter, in the order of its rows; iterates over them.

    Attributes:
        name: str, of the parameter in its model.
        shape: torch.Size of the whole.
        homes: [(module, name there)] that use it.
        owner: (_C.ShardedModel, index) that had sharded the whole before the engine; (None, None): it was not sharded.
        most_read: int, the most bytes that may be whole at once for a read outside its modules; None: any.
    """

    def __init__(self, name, parameter, shape, ranges, homes, most_read):
        self.name, self.shape, self.homes, self.most_read = name, torch.Size(shape), homes, most_read
        self.dtype, self._strides, self.owner = parameter.dtype, parameter.stride(), (None, None)
        self._whole = weakref.ref(parameter)
        self._tiles = []
        for begin, end in ranges:
            values = parameter.data[begin:end] if parameter.numel() else parameter.data
            tile = Tile(torch.nn.Parameter(values, parameter.requires_grad), begin, end)
            tile.parameter._strata_tile = (self, tile)
            self._tiles.append(tile)

    def __iter__(self):
        return iter(self._tiles)

    def __reversed__(self):
        return reversed(self._tiles)

    def __len__(self):
        return len(self._tiles)

    def __getitem__(self, position):
        return self._tiles[position]

    def runs(self, dtype=None):
        """[``TileRun``] or [``Tile``]: the groups of tiles that an operation uses at once to compute with the values in
        ``dtype``; None: in their own. There is one group of all tiles where these are always in this rank's memory and
        need no conversion: one rank's weights, on its device. Else each tile is a group."""
        first, last = self._tiles[0], self._tiles[-1]
        core = first.core
        if core is None or dtype not in (None, first.parameter.dtype) or not core.lie_together(first.index, last.index):
            return self._tiles
        return [TileRun(self._tiles)]

    @property
    def whole(self):
        """The parameter, as users know it."""
        return self._whole()

    @property
    def rows(self):
        """int."""
        return self.shape[0]

    @property
    def row_numel(self):
        """int: elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self):
        """int: of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def device(self):
        """torch.device on which tiles are whole."""
        core = self._tiles[0].core
        return self._tiles[0].parameter.device if core is None else core.device

    @property
    def trainable(self):
        """bool."""
        return self._tiles[0].trainable

    @property
    def anchor(self):
        """A Parameter that stands for all tiles in autograd: operations of the tiles depend on it."""
        return self._tiles[0].parameter

    def joined(self):
        """The whole, where the tiles still are the rows of one tensor, or have memory of their own; None: they are
        empty."""
        parts = [tile.parameter.data for tile in self._tiles]
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
                "strata.zero.GatheredParameters, which makes it whole on the host"
            )


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


class Known(NamedTuple):
    """A parameter as users know it, and its parts in an engine."""

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


def known_parameters(described):
    """[``Known``] in the order of the model's parameters.

    Args:
        described: the result of ``describe_parameters`` from which an engine was made.
    """
    found = {}
    for index, (_, parameter, shape, *_rest) in enumerate(described):
        whole = known_as(parameter)
        tiles, tile = tile_of(parameter)
        first = 0 if tiles is None else tile.begin * tiles.row_numel
        entry = found.setdefault(id(whole), Known(whole, list(shape if tiles is None else tiles.shape), []))
        entry.parts.append(Part(index, first, math.prod(shape)))
    return list(found.values())
