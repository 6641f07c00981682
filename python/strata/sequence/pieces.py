"""A function of each token, a piece of a row's tokens at a time: the memory within it is that of one piece. After the
tiled MLP of Arctic Long Sequence Training (arXiv 2506.13996)."""

import contextlib

import torch

from .. import _C
from ..model.compiling import outside_graphs
from ..model.tiles import tiles_of


def in_pieces(function, x, piece_tokens, parameters=()):
    """``function(x)``, computed in pieces of dimension -2, again in backward: only ``x`` stays until then. Its parts
    have the bits of ``function`` of those parts; gradients of parameters are summed over pieces in fp32 and reach
    autograd once. In a layer that torch's non-reentrant checkpoint computes again, and that saves nothing behind this
    call, ``function`` does not run for that. Where a weight is trained in tiles, whose gradients come once a pass,
    there is one piece.

    Random numbers are the same in backward as in forward, and so is autocast. Gradients of gradients are torch's error.
    UsageError for arguments and results of other shapes; and in backward for a ``function`` that uses a tensor that
    requires a gradient and is not among ``parameters``.

    Args:
        function: [..., tokens, width] -> [..., tokens, another width], of each token by itself. It reads its weights
            when it is called, from their modules: their memory may be other in backward.
        x: [..., tokens, width], floating.
        piece_tokens: int, the most tokens of a piece.
        parameters: tensors that ``function`` uses, leaves of autograd; those that require no gradient get none.
    """
    if x.dim() < 2 or piece_tokens < 1:
        raise _C.UsageError("in_pieces: wanted x [..., tokens, width] and at least 1 token a piece; found "
                            f"{list(x.shape)} and {piece_tokens}")
    parameters = list(parameters)
    if x.shape[-2] <= piece_tokens or train_in_tiles(parameters):
        return function(x)
    return each_piece(lambda piece, part: function(piece), x, -2, piece_tokens, -2, parameters)


@outside_graphs
def each_piece(function, x, dimension, size, joins_at, parameters):
    """``in_pieces`` for other shapes: the results of ``function(piece, part)``, one for each piece of x, joined.

    Args:
        function: ``part``, a slice, says which tokens the piece has. It uses no other tensors that require gradients,
            and no weights that are trained in tiles.
        dimension: int, of the tokens of x. size: the most tokens of a piece.
        joins_at: int, the dimension of results that has the tokens of their piece; None: results are stacked.
    """
    parameters = list({id(p): p for p in parameters if p.requires_grad}.values())
    pieces = _Pieces(function, dimension, size, joins_at, x)
    if len(pieces.parts) == 1:
        found = function(x, pieces.parts[0])
        return found[None] if joins_at is None else found
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return pieces.joined(x)
    return _Again.apply(_Kept.apply(x), pieces, *parameters)


def train_in_tiles(parameters):
    """bool: whether one of them is used in tiles, and trained."""
    return any(tiles.anchor.requires_grad for tiles in map(tiles_of, parameters) if tiles is not None)


class _Pieces:
    """How ``each_piece`` cuts x, and joins results."""

    def __init__(self, function, dimension, size, joins_at, x):
        self.function, self._dimension, self._joins_at = function, dimension, joins_at
        tokens = x.shape[dimension]
        self.parts = [slice(begin, min(begin + size, tokens)) for begin in range(0, max(1, tokens), size)]

    def of(self, x, part):
        """A view of the part of x, or of its gradient."""
        return x.narrow(self._dimension, part.start, part.stop - part.start)

    def of_result(self, result, number, part):
        """A view of the same part of the joined results, or of their gradient. ``number``: of the piece."""
        if self._joins_at is None:
            return result[number]
        return result.narrow(self._joins_at, part.start, part.stop - part.start)

    def joined(self, x):
        """The results of all pieces, as one tensor."""
        out = None
        for number, part in enumerate(self.parts):
            piece = self.of(x, part)
            found = self.function(piece, part)
            self._require_tokens(found, piece, part)
            if out is None:
                shape = list(found.shape)
                if self._joins_at is None:
                    shape.insert(0, len(self.parts))
                else:
                    shape[self._joins_at] = x.shape[self._dimension]
                out = found.new_empty(shape)
            self.of_result(out, number, part).copy_(found)
            del found  # before the next one is made
        return out

    def _require_tokens(self, found, piece, part):
        at, tokens = self._joins_at, part.stop - part.start
        if not torch.is_tensor(found):
            wrong = type(found).__name__
        elif at is None or -found.dim() <= at < found.dim() and found.shape[at] == tokens:
            return
        else:
            wrong = list(found.shape)
        wanted = "a tensor" if at is None else f"a tensor with {tokens} tokens at dimension {at}"
        raise _C.UsageError(f"pieces: wanted {wanted} from the function of a piece {list(piece.shape)}; found {wrong}")


class _Kept(torch.autograd.Function):
    """x, saved in a node before that of ``_Again``, which saves nothing: a checkpoint that computes again what was
    saved ends here, and does not call the function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pieces, *parameters):
        ctx.pieces, ctx.parameters = pieces, parameters
        ctx.kept, ctx.first = x.grad_fn, _FirstCall(x.device)
        if ctx.kept is None:  # x requires no gradient
            ctx.save_for_backward(x)
        with ctx.first.autocast():
            return pieces.joined(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = (ctx.kept or ctx).saved_tensors
        wanted = [p for p, needs in zip(ctx.parameters, ctx.needs_input_grad[2:]) if needs]
        sums, pieces = _GradientSums(wanted), ctx.pieces
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        with ctx.first.again():
            for number, part in enumerate(pieces.parts):
                piece = pieces.of(x, part).detach().requires_grad_(dx is not None)
                with torch.enable_grad():
                    found = pieces.function(piece, part)
                if number == 0:
                    _require_only(found, [piece, *ctx.parameters])
                of_piece = sums.add(found, pieces.of_result(gradient, number, part), piece)
                del found
                if dx is not None:
                    pieces.of(dx, part).copy_(of_piece) if of_piece is not None else pieces.of(dx, part).zero_()
        return dx, None, *(sums.of(p) for p in ctx.parameters)


class _FirstCall:
    """The random numbers of a device, and autocast there, as a call finds them that begins when this is made."""

    def __init__(self, device):
        self._device = device
        self._numbers = torch.get_rng_state() if device.type == "cpu" else self._module().get_rng_state(device)
        self._autocast = {"dtype": torch.get_autocast_dtype(device.type),
                          "enabled": torch.is_autocast_enabled(device.type)}

    def _module(self):
        return torch.get_device_module(self._device)

    def autocast(self):
        """A context with that autocast. It has no cache, which keeps weights, and without their graph if they were cast
        under no_grad."""
        return torch.autocast(self._device.type, cache_enabled=False, **self._autocast)

    @contextlib.contextmanager
    def again(self):
        """A context for another call that finds the same; other random numbers go on behind it as before."""
        of_host = self._device.type == "cpu"
        devices, kind = ([], "cuda") if of_host else ([self._device], self._device.type)
        with torch.random.fork_rng(devices, device_type=kind), self.autocast():
            torch.set_rng_state(self._numbers) if of_host else self._module().set_rng_state(self._numbers, self._device)
            yield


class _GradientSums:
    """Sums of gradients of ``parameters``, leaves of autograd, over calls that use them, at least in fp32."""

    def __init__(self, parameters):
        self._parameters, self._sums = parameters, {}

    def add(self, found, gradient, x):
        """Adds the gradients that ``found`` of one call gives for its own ``gradient``. Returns that of ``x``, or None
        where it requires none or ``found`` does not depend on it."""
        wanted = [*self._parameters, *([x] if x.requires_grad else [])]
        if not found.requires_grad or not wanted:
            return None
        with _without_hooks(self._parameters):
            given = torch.autograd.grad(found, wanted, gradient, allow_unused=True)
        for parameter, one in zip(self._parameters, given):
            if one is not None and id(parameter) in self._sums:
                self._sums[id(parameter)] += one
            elif one is not None:
                self._sums[id(parameter)] = one.to(torch.promote_types(one.dtype, torch.float32), copy=True)
        return given[-1] if x.requires_grad else None

    def of(self, parameter):
        """The sum in the parameter's dtype; None without a gradient."""
        found = self._sums.get(id(parameter))
        return None if found is None else found.to(parameter.dtype)


@contextlib.contextmanager
def _without_hooks(parameters):
    """Without the user's hooks of these tensors, which are for whole gradients."""
    held = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def _require_only(found, allowed):
    """UsageError where ``found`` depends on leaves of autograd other than ``allowed``."""
    known, seen, waiting = {id(tensor) for tensor in allowed}, set(), [found.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise _C.UsageError(f"pieces: the function uses a tensor {list(leaf.shape)} that requires a gradient, and "
                                "is not among its parameters, so it would get none; name all that it uses")
