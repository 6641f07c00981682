"""DeepSpeed's functions that compute long rows in tiles (arXiv 2506.13996), over ``strata.sequence.pieces``: forward
runs without a graph and again in backward, gradients of weights are summed in fp32, and reach the engine once.

``compute_params`` are weights that the function uses; None: those of the modules among its arguments. These count in
any case. A backward pass of a function that uses others is a UsageError. Ranks may have different numbers of tiles
where they gather the weights of whole blocks, as Strata does for models of transformers. There is one tile, an ordinary
call, where such a weight is itself trained in tiles, of ``strata.tiles``."""

import itertools
import math

import torch

from .. import _C
from ..sequence.pieces import each_piece, in_pieces, train_in_tiles


class TiledMLP:
    """Stands for DeepSpeed's autograd function."""

    @staticmethod
    def apply(fn, self, x, shards, compute_params=None):
        """``fn(self, x)``, in at most ``shards`` tiles of tokens. One tile is an ordinary call. In a layer that torch's
        non-reentrant checkpoint computes again, ``fn`` does not run for that where nothing behind it saves a tensor.

        Args:
            fn: of a module and a tensor [..., tokens, width], of each token by itself.
            self: the module.
            x: [..., tokens, width].
            shards: int, at least 1; UsageError otherwise.
        """
        weights = _weights(compute_params, self)
        size = _tile_of("TiledMLP", x.shape[-2], shards, weights)
        return in_pieces(lambda piece: fn(self, piece), x, size, weights)


class SequenceTiledCompute:
    """Stands for DeepSpeed's autograd function."""

    @staticmethod
    def apply(fn, seqlen, shards, keys_to_shard, keys_to_pass, grad_requiring_tensor_key, compute_params,
              output_unshard_dimension, output_reduction, *args):  # fmt: skip
        """``sequence_tiled_compute``, with its dicts as keys and ``args``, their values in the same order."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(fn, seqlen, shards, dict(zip(keys_to_shard, args[:count])),
                                      dict(zip(keys_to_pass, args[count:])), grad_requiring_tensor_key, compute_params,
                                      output_unshard_dimension, output_reduction)  # fmt: skip


def sequence_tiled_compute(fn, seqlen, shards, kwargs_to_shard, kwargs_to_pass, grad_requiring_tensor_key,
                           compute_params=None, output_unshard_dimension=1, output_reduction="mean"):  # fmt: skip
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, in at most ``shards`` tiles of tokens.

    Args:
        fn: of keywords; returns a tensor with the tile's tokens at ``output_unshard_dimension``, or of any shape if
            that is 0: then results are stacked.
        seqlen: int, the tokens.
        shards: int, at least 1.
        kwargs_to_shard: {name: tensor [batch, tokens, ...]}.
        kwargs_to_pass: {name: value}, for every tile.
        grad_requiring_tensor_key: the name in ``kwargs_to_shard`` of the only tensor that gets a gradient.
        output_reduction: "mean" or "sum" of all elements of the result, or None. The mean of stacked results weighs
            tiles alike, as in DeepSpeed, the last one though it may be shorter.

    Raises:
        UsageError: ``shards`` is below 1; a tensor has not ``seqlen`` tokens; there is no such key.
        ValueError: another reduction.
    """
    if output_reduction not in (None, "mean", "sum"):
        raise ValueError(f"output_reduction: wanted None, 'mean' or 'sum'; found {output_reduction!r}")
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise _C.UsageError(f"sequence_tiled_compute: grad_requiring_tensor_key: wanted one of {list(kwargs_to_shard)} "
                            f"of kwargs_to_shard; found {grad_requiring_tensor_key!r}")
    for name, tensor in kwargs_to_shard.items():
        if tensor.dim() < 2 or tensor.shape[1] != seqlen:
            raise _C.UsageError(f"sequence_tiled_compute: '{name}': wanted [batch, {seqlen} tokens, ...]; found "
                                f"{list(tensor.shape)}")
    weights = _weights(compute_params, *kwargs_to_pass.values(), getattr(fn, "__self__", fn))
    size = _tile_of("sequence_tiled_compute", seqlen, shards, weights)
    others = {name: tensor.detach() for name, tensor in kwargs_to_shard.items() if name != grad_requiring_tensor_key}

    def of_tile(piece, part):
        tile = {name: tensor[:, part] for name, tensor in others.items()}
        return fn(**{grad_requiring_tensor_key: piece}, **tile, **kwargs_to_pass)

    found = each_piece(of_tile, kwargs_to_shard[grad_requiring_tensor_key], 1, size, output_unshard_dimension or None,
                       weights)  # fmt: skip
    return found if output_reduction is None else getattr(found, output_reduction)()


class TiledFusedLogitsLoss:
    """Stands for DeepSpeed's autograd function."""

    @staticmethod
    def apply(fn, self, x, y, mask, shards, compute_params=None, output_reduction="mean"):
        """The loss of tokens, whose logits exist for one of at most ``shards`` tiles at a time.

        DeepSpeed computes gradients in forward, and those of weights ignore what a script does with the loss. Here they
        are computed in backward, from the gradient that arrives, and a loss without a backward pass makes none.

        Args:
            fn: of ``self`` and a tile of ``x`` and ``y`` (and ``mask``, unless that is None), [tokens, ...], all rows
                one behind the other; returns the loss of a tile, of one element.
            self: any object; if it is a module, its weights count.
            x: [batch, tokens, ...], which alone gets a gradient.
            y: [batch, tokens, ...], labels.
            mask: [batch, tokens] or None.
            shards: int, at least 1; UsageError otherwise.
            output_reduction: "sum" or "mean" of tiles' losses. Where ``y`` has integers and there is no mask, the mean
                weighs tiles by labels other than -100, as a loss over all tokens does; without any it is 0. Else it
                weighs them alike, as DeepSpeed always does.

        Raises:
            ValueError: another reduction, or shapes that do not fit each other.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f"output_reduction: wanted 'mean' or 'sum'; found {output_reduction!r}")
        rows = x.shape[:2]
        if min(x.dim(), y.dim()) < 2 or y.shape[:2] != rows or mask is not None and mask.shape != rows:
            found = f"{list(x.shape)}, {list(y.shape)} and {None if mask is None else list(mask.shape)}"
            raise ValueError("TiledFusedLogitsLoss: wanted x and y [batch, tokens, ...] and mask [batch, tokens]; "
                             f"found {found}")
        x, labels = x.flatten(0, 1), y.detach().flatten(0, 1)
        others = [labels] if mask is None else [labels, mask.flatten()]
        weights = _weights(compute_params, self)
        size = _tile_of("TiledFusedLogitsLoss", len(x), shards, weights)

        def of_tile(piece, part):
            return fn(self, piece, *(tensor[part] for tensor in others)).reshape(())

        losses = each_piece(of_tile, x, 0, size, None, weights)
        if output_reduction == "sum" or mask is not None or labels.is_floating_point():
            return getattr(losses, output_reduction)()
        counts = torch.stack([(tile != -100).sum() for tile in labels.split(size)])
        shares = counts / counts.sum().clamp(min=1)
        return (torch.where(counts > 0, losses, 0.0) * shares).sum().to(losses.dtype)


def _tile_of(name, tokens, shards, weights):
    """int: the tokens of a tile, at least 1."""
    if shards < 1:
        raise _C.UsageError(f"{name}: shards: wanted at least 1; found {shards}")
    return max(1, tokens if train_in_tiles(weights) else math.ceil(tokens / shards))


def _weights(compute_params, *arguments):
    modules = [value for value in arguments if isinstance(value, torch.nn.Module)]
    return list(itertools.chain(compute_params or (), *(module.parameters() for module in modules)))
