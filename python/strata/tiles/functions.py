"""Operations that use a parameter tile by tile, forward and backward. Each gathers a tile, computes with it, and
releases it. In backward they write a tile's gradient into the memory from which the engine reduces it, at once.
They save their inputs for backward, and no weights.

A tile computes the same values for its rows as the whole parameter would. Sums of tiles' results (the gradient of a
linear layer's input, the output of ``matmul``) are kept in fp32: tensors of 16 bits are rounded once at the end, or
once a tile if the BLAS cannot add them to an fp32 sum itself.

Rows that are ordered by group, each group with its own matrix, go through one grouped product where the device has a
kernel for it, else through one product for each group. Both ways give the same bits where their kernels do."""

import functools

import torch

from .. import _C
from ..model.tiles import write_product
from .host_copy import LateValues

_MOST_GROUPS = 1023  # of one grouped product of torch


class Groups:
    """Which rows belong to which group: those up to ``ends[0]`` to the first, those up to ``ends[1]`` to the next; rows
    behind the last end to none. ``ends``: int32 tensor [groups], on the rows' device."""

    def __init__(self, ends):
        self.ends = ends.int()
        self._on_host = LateValues(self.ends)

    @staticmethod
    def of_sorted(members, groups):
        """Groups by ``members``: each row's group, ascending; a number of ``groups`` or more belongs to none."""
        return Groups(torch.searchsorted(members, torch.arange(groups, device=members.device), right=True))

    @functools.cached_property
    def bounds(self):
        """[int]: 0 and ``ends``. The first call waits for the device, since the host decides on the rows of a tile's
        product, and whether the rank needs the tile at all."""
        return [0, *self._on_host.get().tolist()]

    rows = property(lambda self: self.bounds[-1], doc="int: the number of rows that belong to a group.")


class Members:
    """The rows of the ``groups`` [begin, end). ``rows``: slice of all rows. ``each``: [(group, counted from the first
    of these, slice of ``rows``)] without groups that have none. ``count``: int, groups."""

    def __init__(self, groups, begin, end):
        bounds = groups.bounds[begin : end + 1]
        first = bounds[0]
        self.rows, self.count = slice(first, bounds[-1]), end - begin
        self.each = [(group, slice(bounds[group] - first, bounds[group + 1] - first))
                     for group in range(self.count) if bounds[group] < bounds[group + 1]]  # fmt: skip
        self.ends = groups.ends[begin:end]
        if first:
            self.ends = self.ends - first

    def multiply(self, rows, matrices, out):
        """``out = rows @ matrix of the row's group``; rows [rows, k], of these groups; matrices [groups, k, n]."""
        if has_grouped_product(rows, matrices):
            out.copy_(torch.nn.functional.grouped_mm(rows, matrices, offs=self.ends))
            return
        for group, here in self.each:
            torch.mm(rows[here], matrices[group], out=out[here])

    def multiply_transposed(self, one, other, place):
        """Writes the gradient of the groups' matrices, ``one.t() @ other`` of each group's rows, to a
        ``GradientTarget``."""
        if not self.each:
            place.add_nothing()
            return
        if has_grouped_product(one, other):
            place.add(torch.nn.functional.grouped_mm(one.t(), other, offs=self.ends))
            return
        used = dict(self.each)
        for group in range(self.count):
            if group in used:
                place.add_product(one[used[group]].t(), other[used[group]], group)
            else:
                place.add_nothing(group)


def has_grouped_product(rows, other):
    """Whether torch has one kernel for the grouped product of ``rows`` [rows, k] and ``other`` [groups, k, n] or [rows,
    n]: in bf16, on some GPUs. Elsewhere torch's is a loop that waits for the offsets, which the host already has."""
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] not in (9, 10):
        return False
    if rows.dtype != torch.bfloat16 or other.dtype != torch.bfloat16 or not rows.is_contiguous():
        return False
    # It reads 16 bytes at once.
    sizes = [*rows.shape[1:], *other.shape[1:]]
    aligned = all(size % 8 == 0 for size in sizes) and all(t.data_ptr() % 16 == 0 for t in (rows, other))
    return aligned and (other.dim() == 2 or len(other) <= _MOST_GROUPS)


def linear(x, tiles, bias=None):
    """``torch.nn.functional.linear(x, weight, bias)``: x [..., in], floating, ``Tiles`` of a weight [out, in], bias
    [out] or None to [..., out] of x's dtype; under autocast of autocast's."""
    x, bias, dtype = _autocast(x, bias)
    return _Product.apply(x, bias, tiles.anchor, tiles, dtype, True)


def matmul(x, tiles, bias=None):
    """``x @ weight + bias`` for a weight [in, out] in tiles, whose results are added up; else as ``linear``."""
    x, bias, dtype = _autocast(x, bias)
    return _Product.apply(x, bias, tiles.anchor, tiles, dtype, False)


def embedding(ids, tiles, padding_idx=None, scale_grad_by_freq=False):
    """``torch.nn.functional.embedding``, whose other arguments are torch's: ids [...], of integers, ``Tiles`` of a
    weight [ids, width], each of which serves the ids in its range. UsageError where an id is not a row."""
    return _Embedding.apply(ids, tiles.anchor, tiles, padding_idx, scale_grad_by_freq)


def grouped_linear(x, tiles, counts, transposed=False):
    """One linear layer a group of rows: the first ``counts[0]`` rows of ``x`` [rows, in], floating, go through the
    first matrix of the weight, and so on. Returns [rows, out]; zeroes for rows that belong to no group. ``tiles``:
    ``Tiles`` of a weight [groups, out, in], or [groups, in, out] if ``transposed``. ``counts``: [int], rows of each
    group, or ``Groups``, which has them on the device."""
    x, _, dtype = _autocast(x, None)
    if not isinstance(counts, Groups):
        counts = Groups(torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0))
    return _GroupedLinear.apply(x, tiles.anchor, tiles, counts, transposed, dtype)


def apply_tile(function, tile, *tensors):
    """``function(values of the tile, *tensors)``, a tensor or a tuple of them, which may depend on all of these; other
    arguments the function may have bound. Backward runs it again, so that nothing of the tile is kept; it must do the
    same then, and keep nothing of the tile's values."""
    return _Again.apply(function, tile, tile.parameter, *tensors)


def whole(tiles):
    """All of the parameter as one tensor, whose gradient goes to the tiles. UsageError where it is too large."""
    tiles.require_readable()
    return _Whole.apply(tiles.anchor, tiles)


def _autocast(x, bias):
    """Both in autocast's dtype, and the dtype in which a weight counts there; without autocast unchanged, and None."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return x, bias, None
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), None if bias is None else bias.to(dtype), dtype


def _as(weight, dtype):
    return weight if dtype is None else weight.to(dtype)


class _Columns:
    """``x @ weight.t() + bias``: each tile's result is columns of it."""

    def __init__(self, x, tiles, bias, terms):
        self._x, self._bias = x, bias
        self._out = x.new_empty(x.shape[0], tiles.rows)

    def add(self, tile, weight):
        here = self._out[:, tile.begin : tile.end]
        if self._bias is None:
            torch.mm(self._x, weight.t(), out=here)
        else:
            torch.addmm(self._bias[tile.begin : tile.end], self._x, weight.t(), out=here)

    def value(self):
        return self._out


class _Sum:
    """``x @ weight + bias``: each tile takes columns of x, and its result is one of ``terms`` terms of a sum."""

    def __init__(self, x, tiles, bias, terms):
        self._x = x
        self._wide = torch.float32 if x.dtype.itemsize < 4 and terms > 1 else x.dtype
        self._total = x.new_empty(x.shape[0], tiles.shape[1], dtype=self._wide)
        self._holds = bias is not None
        if self._holds:
            self._total.copy_(bias)

    def add(self, tile, weight):
        write_product(self._total, self._x[:, tile.begin : tile.end], weight, self._holds)
        self._holds = True

    def value(self):
        return self._total.to(self._x.dtype)


class _Product(torch.autograd.Function):
    """The rows of the weight are outputs, as a linear layer's are, or inputs. The gradient of x is the other product of
    the two, of the output's gradient."""

    @staticmethod
    def forward(ctx, x, bias, anchor, tiles, dtype, are_outputs):
        ctx.tiles, ctx.dtype, ctx.are_outputs = tiles, dtype, are_outputs
        ctx.save_for_backward(x)
        runs = tiles.runs(dtype)
        product = (_Columns if are_outputs else _Sum)(x.reshape(-1, x.shape[-1]), tiles, bias, len(runs))
        for run in runs:
            with run as weight:
                product.add(run, _as(weight, dtype))
        return product.value().view(*x.shape[:-1], tiles.rows if are_outputs else tiles.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        flat, given = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_rows, other = (given, flat) if ctx.are_outputs else (flat, given)
        runs, product = ctx.tiles.runs(ctx.dtype), None
        if ctx.needs_input_grad[0]:
            product = (_Sum if ctx.are_outputs else _Columns)(given, ctx.tiles, None, len(runs))
        for run in reversed(runs):
            if product is not None:
                with run as weight:
                    product.add(run, _as(weight, ctx.dtype))
            for tile in reversed(run.tiles):
                if tile.trainable:
                    with tile.gradient() as place:
                        place.add_product(of_rows[:, tile.begin : tile.end].t(), other)
        dx = None if product is None else product.value().view_as(x)
        return dx, given.sum(0) if ctx.needs_input_grad[1] else None, None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, anchor, tiles, padding_idx, scale_grad_by_freq):
        flat = ids.reshape(-1)
        in_order, order = torch.sort(flat, stable=True)
        ends = torch.tensor([tile.end for tile in tiles], device=flat.device, dtype=flat.dtype)
        # The one time that the host waits for the device: which tile has how many.
        ends = torch.cat([torch.searchsorted(in_order, ends), (flat < 0).sum().view(1)]).tolist()
        if ends.pop() or (ends[-1] if ends else 0) < flat.numel():
            raise _C.UsageError(f"an id of '{tiles.name}' is not among its {tiles.rows} rows")
        ctx.tiles, ctx.ends, ctx.padding_idx, ctx.scale = tiles, ends, padding_idx, scale_grad_by_freq
        ctx.save_for_backward(in_order, order)
        out = torch.empty((flat.numel(), *tiles.shape[1:]), dtype=tiles.anchor.dtype, device=flat.device)
        begin = 0
        for tile, end in zip(tiles, ends):
            if begin < end or not tile.left_out():
                with tile as weight:
                    out[order[begin:end]] = weight[in_order[begin:end] - tile.begin]
            begin = end
        return out.view(*ids.shape, *tiles.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        in_order, order = ctx.saved_tensors
        given = grad.reshape(-1, grad.shape[-1])
        begins = [0, *ctx.ends]
        for i in reversed(range(len(ctx.tiles))):
            tile, here = ctx.tiles[i], slice(begins[i], begins[i + 1])
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx - tile.begin
            tile.give_gradient(
                torch.ops.aten.embedding_dense_backward(given[order[here]], in_order[here] - tile.begin, tile.rows,
                                                        padding if 0 <= padding < tile.rows else -1, ctx.scale))
        return None, None, None, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, tiles, groups, transposed, dtype):
        ctx.tiles, ctx.groups, ctx.transposed, ctx.dtype = tiles, groups, transposed, dtype
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = x.new_empty(x.shape[0], tiles.shape[2 if transposed else 1])
        for run in tiles.runs(dtype):
            members = Members(groups, run.begin, run.end)
            if not members.each and run.left_out():
                continue
            with run as weight:
                if members.each:
                    matrices = _as(weight, dtype)
                    members.multiply(x[members.rows], matrices if transposed else matrices.mT, out[members.rows])
        out[groups.rows :].zero_()
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for run in reversed(ctx.tiles.runs(ctx.dtype)):
            members = Members(ctx.groups, run.begin, run.end)
            if dx is not None and (members.each or not run.left_out()):
                with run as weight:
                    if members.each:
                        matrices = _as(weight, ctx.dtype)
                        matrices = matrices.mT if ctx.transposed else matrices
                        members.multiply(grad[members.rows], matrices, dx[members.rows])
            for tile in reversed(run.tiles):
                if tile.trainable:
                    members = Members(ctx.groups, tile.begin, tile.end)
                    ends = x[members.rows], grad[members.rows]
                    with tile.gradient() as place:
                        members.multiply_transposed(*(ends if ctx.transposed else reversed(ends)), place)
        if dx is not None:
            dx[ctx.groups.rows :].zero_()
        return dx, None, None, None, None, None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, tile, parameter, *tensors):
        ctx.function, ctx.tile = function, tile
        ctx.save_for_backward(*tensors)
        with tile as values:
            return function(values, *tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        tile, needs = ctx.tile, ctx.needs_input_grad[3:]
        tensors = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs)]
        with tile as values:
            values = values.detach().requires_grad_(tile.trainable)
            with torch.enable_grad():
                outputs = ctx.function(values, *tensors)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            used = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad and g is not None]
            wanted = [t for t in (values, *tensors) if t.requires_grad]
            found = iter(torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used], allow_unused=True))
            of_tile = next(found) if tile.trainable else None
        if tile.trainable:
            tile.give_gradient(torch.zeros_like(values) if of_tile is None else of_tile)
        return None, None, None, *(next(found) if need else None for need in needs)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, tiles):
        ctx.tiles = tiles
        values = torch.empty(tiles.shape, dtype=anchor.dtype, device=tiles.device)
        for tile in tiles:
            with tile as rows:
                values[tile.begin : tile.end] = rows
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        for tile in reversed(ctx.tiles):
            tile.give_gradient(grad[tile.begin : tile.end])
        return None, None
