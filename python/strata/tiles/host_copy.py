"""Values on the host: whole ones of parameters that are too large for a device, or piece by piece; late ones."""

import os

import torch

from .. import _C
from ..model.parameter import full_shape, gathered, owner_of
from ..model.tiles import tiles_of


def values_on_host(parameter, keep=True):
    """A copy on the host, in its dtype and shape, of the values of a parameter. Collective where gathers are. Where
    it is used in tiles, the device has one at a time. ``keep=False``: take part, and return None. UsageError where the
    host has no room for it."""
    tiles = tiles_of(parameter)
    if tiles is None:
        for _, _, values in iter_pieces(parameter):  # one piece
            copied = values.cpu().clone() if keep else None
        return copied
    free = available_host_memory() if keep else None
    if free is not None and tiles.nbytes > free:
        raise _C.UsageError(f"'{tiles.name}' takes {tiles.nbytes} bytes, and the host has {free} available for it; use "
                            "strata.iter_pieces(parameter), which makes one tile of it whole at a time")
    values = torch.empty(tiles.shape, dtype=tiles.anchor.dtype) if keep else None
    for tile in tiles:
        with tile as rows:
            if keep:
                values[tile.begin : tile.end] = rows
    return values


def end_host_copy(parameter, modifier_rank):
    """Makes a parameter in tiles, whose memory is ``values_on_host()`` now, empty again. Collective with
    ``modifier_rank``: every rank gets that rank's values; None: changes are lost."""
    values, tiles = parameter.data, tiles_of(parameter)
    try:
        for tile in tiles if modifier_rank is not None else ():
            with gathered(tile.core, [tile.index], modifier_rank), torch.no_grad():
                tile.parameter.copy_(values[tile.begin : tile.end])
    finally:
        parameter.data = values.new_empty(0, device=tiles.device)


def iter_pieces(parameter, modifier_rank=None):
    """Iterates over the rows of a parameter of any size, a piece at a time: tile by tile where it is used in tiles,
    else all of it at once. Collective where gathers are; each piece is whole on every rank until the next one. Yields
    (first row, behind the last row, Tensor [rows, ...] in the parameter's dtype, on the model's device). A parameter
    without dimensions is one piece of it, rows 0 to 1.

    Args:
        parameter: a Parameter, under an engine or not.
        modifier_rank: the rank whose changes count: every rank gets the values that it has written to a piece, in the
            weights and the fp32 master weights. None: read only.
    """
    tiles = tiles_of(parameter)
    if tiles is None:
        shape = full_shape(parameter)
        pieces = [(0, shape[0] if shape else 1, parameter, *owner_of(parameter))]
    else:
        pieces = [(tile.begin, tile.end, tile.parameter, tile.core, tile.index) for tile in tiles]
    for begin, end, piece, core, index in pieces:
        if core is None:
            yield begin, end, piece.detach()
            continue
        with gathered(core, [index], modifier_rank):
            yield begin, end, piece.detach()


class LateValues:
    """The present values of a tensor, on the host. A GPU copies them in its stream, while the host queues more work."""

    def __init__(self, tensor):
        self._values, self._event = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def ready(self):
        """bool: whether ``get()`` would not wait."""
        return self._event is None or self._event.query()

    def get(self):
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def available_host_memory():
    """int, bytes that a process of this host may still take; None: not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return free // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
