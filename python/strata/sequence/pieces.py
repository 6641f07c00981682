"""A function of each token, a piece of a row's tokens at a time: the memory within it is that of one piece. After the
tiled MLP of Arctic Long Sequence Training (arXiv 2506.13996)."""

import contextlib

import torch

from .. import _C
from ..model.compiling import outside_graphs
from ..model.tiles import tile_of, tiles_of


@outside_graphs
def in_pieces(function, x, piece_tokens, parameters=()):
    """``function(x)``, computed in pieces of dimension -2, again in backward: only ``x`` stays until then. Its parts
    have the bits of ``function`` of those parts; gradients of parameters are summed over pieces in fp32 and reach
    autograd once. In a layer that torch's non-reentrant checkpoint computes again, and that saves nothing behind this
    call, ``function`` does not run for that.

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
    if x.shape[-2] <= piece_tokens:
        return function(x)
    parameters = trainable(parameters)
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _joined(function, x, piece_tokens)
    return _Pieces.apply(_Kept.apply(x), function, piece_tokens, *parameters)


def trainable(parameters):
    """[tensor]: those that require a gradient, each once. One that is used in tiles has the tiles' anchor here."""
    anchored = ((p, tiles_of(p)) for p in parameters)
    found = (p if tiles is None else tiles.anchor for p, tiles in anchored)
    return list({id(p): p for p in found if p.requires_grad}.values())


def _joined(function, x, size):
    out = None
    for begin in range(0, x.shape[-2], size):
        piece = x.narrow(-2, begin, min(size, x.shape[-2] - begin))
        found = function(piece)
        _require_tokens(found, piece)
        out = found.new_empty(*x.shape[:-1], found.shape[-1]) if out is None else out
        out.narrow(-2, begin, piece.shape[-2]).copy_(found)
        del found  # before the next one is made
    return out


def _require_tokens(found, piece):
    if not torch.is_tensor(found) or found.shape[:-1] != piece.shape[:-1]:
        what = list(found.shape) if torch.is_tensor(found) else type(found).__name__
        raise _C.UsageError(f"in_pieces: wanted a tensor {list(piece.shape[:-1])} x width from a function of a piece "
                            f"{list(piece.shape)}; found {what}")


class _Kept(torch.autograd.Function):
    """x, saved in a node before that of ``_Pieces``, which saves nothing: a checkpoint that computes again what was
    saved ends here, and does not call the function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, size, *parameters):
        ctx.function, ctx.size, ctx.parameters = function, size, parameters
        ctx.kept, ctx.again = x.grad_fn, Again(x.device)
        if ctx.kept is None:  # x requires no gradient
            ctx.save_for_backward(x)
        with ctx.again.autocast():
            return _joined(function, x, size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = (ctx.kept or ctx).saved_tensors
        wanted = [p for p, needs in zip(ctx.parameters, ctx.needs_input_grad[3:]) if needs]
        sums = GradientSums(wanted)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        with ctx.again.as_in_forward():
            for begin in range(0, x.shape[-2], ctx.size):
                part = slice(begin, min(begin + ctx.size, x.shape[-2]))
                piece = x[..., part, :].detach().requires_grad_(dx is not None)
                with torch.enable_grad():
                    found = ctx.function(piece)
                if begin == 0:
                    require_only(found, [piece, *ctx.parameters])
                of_piece = sums.add(found, gradient[..., part, :], piece)
                del found
                if dx is not None:
                    dx[..., part, :] = 0 if of_piece is None else of_piece
        return dx, None, None, *(sums.of(p) for p in ctx.parameters)


class Again:
    """Has a second call of a function, in backward, compute as the first one, which begins when this is made: with the
    same random numbers of a device, and with autocast as there."""

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
    def as_in_forward(self):
        """A context that begins as the first call did; other random numbers go on behind it as before."""
        of_host = self._device.type == "cpu"
        devices, kind = ([], "cuda") if of_host else ([self._device], self._device.type)
        with torch.random.fork_rng(devices, device_type=kind), self.autocast():
            torch.set_rng_state(self._numbers) if of_host else self._module().set_rng_state(self._numbers, self._device)
            yield


class GradientSums:
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


def leaves_of(found):
    """[tensor]: the leaves of autograd that ``found`` depends on."""
    leaves, seen, waiting = [], set(), [found.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def require_only(found, allowed):
    """UsageError where ``found`` depends on leaves of autograd other than ``allowed``."""
    known = {id(tensor) for tensor in allowed}
    for leaf in leaves_of(found):
        if id(leaf) not in known and tile_of(leaf)[0] is None:  # tiles give their gradients themselves
            raise _C.UsageError(f"the function in pieces uses a tensor {list(leaf.shape)} that requires a gradient and "
                                "is not among its parameters, so it would get none; name all that it uses")
