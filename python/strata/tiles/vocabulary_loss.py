"""A projection onto a vocabulary and its cross-entropy, a block of the vocabulary and of the tokens at a time.

Forward updates two numbers for each token: the maximum of its logits so far and the sum of their exponentials relative
to it (the online softmax of Milakov and Gimelshein, 2018). Both give the logarithm of the sum of all exponentials.
This logarithm and the logit of the token's label stay for backward, beside the input. Backward computes each block's
logits again and, in the same sweep, the gradients of the input and of the block of weights. It needs the logarithm over
the whole vocabulary, so forward cannot compute gradients on the way. This takes four products where a loss that keeps
its logits takes three; the memory of the logits is saved."""

import copy
import weakref
from contextlib import ExitStack, nullcontext

import torch
from torch.utils._pytree import tree_map

from .. import _C
from ..model.compiling import outside_graphs
from ..model.interception import replaced
from ..model.tiles import Destination, ProductSum, Tile, tiles_of, write_product
from .functions import linear

_BLOCK_BYTES = 128 << 20  # of fp32 logits at once
_BLOCK_ROWS = 8192  # of a weight that is not in tiles


@outside_graphs
def linear_cross_entropy(hidden, weight, labels, bias=None, ignore_index=-100, reduction="mean", block_bytes=None):
    """``cross_entropy(linear(hidden, weight, bias), labels)``, which never holds the logits of the whole vocabulary.

    Logits are computed in hidden's dtype, as ``torch.nn.functional.linear`` does, and all that follows in fp32. Against
    the plain expression with fp32 logits, losses and gradients agree to the rounding of sums in another order: to 1e-5
    of their size in fp32; in bf16 as far as two of its roundings lie apart, 1e-2. Returns fp32, of one element; with
    "none" of labels' shape. UsageError for shapes that do not fit each other, or another reduction. Labels beyond the
    vocabulary give a loss that is not finite.

    Args:
        hidden: [..., width], floating.
        weight: [vocabulary, width]: a tensor, a parameter of an engine that is used in tiles, or a module that has
            ``weight`` and ``bias``, such as ``torch.nn.Linear``.
        labels: [...] of integers, the class of each position; they are not shifted.
        bias: [vocabulary] or None; of a module: its own.
        ignore_index: labels that count for nothing.
        reduction: "mean" over the labels that count, "sum", or "none".
        block_bytes: int, the most bytes of fp32 logits that exist at once; None: 128 MiB.
    """
    if isinstance(weight, torch.nn.Module):
        weight, bias = dict.__getitem__(weight._parameters, "weight"), weight.bias if bias is None else bias
    tiles = tiles_of(weight) if isinstance(weight, torch.nn.Parameter) else None
    shape = weight.shape if tiles is None else tiles.shape
    if labels.shape != hidden.shape[:-1] or hidden.shape[-1] != shape[1]:
        raise _C.UsageError(f"linear_cross_entropy: wanted hidden [..., width], weight [vocabulary, width] and labels "
                            f"[...]; found {list(hidden.shape)}, {list(shape)} and {list(labels.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise _C.UsageError(f"linear_cross_entropy: reduction is 'mean', 'sum' or 'none'; found {reduction!r}")
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    flat = flat.to(_dtype_of(flat))
    blocks = _Blocks(weight, tiles, flat, block_bytes or _BLOCK_BYTES)
    anchor = weight if tiles is None else tiles.anchor
    losses = _Losses.apply(flat, anchor, bias, classes, ignore_index, blocks)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (classes != ignore_index).sum()


class _Blocks:
    """The blocks of the vocabulary and of the tokens."""

    def __init__(self, weight, tiles, flat, block_bytes):
        self.tiles, self.weight = tiles, weight
        self.dtype = flat.dtype
        rows = max((tile.rows for tile in tiles), default=1) if tiles is not None else min(_BLOCK_ROWS, len(weight))
        self.tokens = max(1, min(len(flat) or 1, block_bytes // (4 * max(1, rows))))
        if tiles is None:
            self.vocabulary = [Tile(weight.detach()[begin : begin + rows], begin, min(begin + rows, len(weight)))
                               for begin in range(0, len(weight), max(1, rows))]  # fmt: skip
        else:
            self.vocabulary = list(tiles)

    def of_tokens(self, count):
        """[slice]."""
        return [slice(begin, min(begin + self.tokens, count)) for begin in range(0, count, self.tokens)]

    def logits(self, x, weight, bias, block):
        """[tokens, rows of the block], fp32 with a bias, else of hidden's dtype."""
        found = x @ weight.to(self.dtype).t()
        return found if bias is None else found.float().add_(bias[block.begin : block.end].float())


def _gradient_of(block, of_weight):
    """A context that gives the ``Destination`` of a block's gradient: a tile has one of its own."""
    return block.gradient() if of_weight is None else nullcontext(Destination(of_weight[block.begin : block.end]))


class _Losses(torch.autograd.Function):
    """The loss of every token, 0 where its label does not count."""

    @staticmethod
    def forward(ctx, flat, weight, bias, labels, ignore_index, blocks):
        count = len(flat)
        highest = flat.new_full((count,), -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        counts = labels != ignore_index
        missing = counts.clone()
        for block in blocks.vocabulary:
            with block as rows:
                for part in blocks.of_tokens(count):
                    logits = blocks.logits(flat[part], rows, bias, block)
                    column, inside = _column(labels[part], block)
                    chosen[part] = torch.where(inside, logits.gather(1, column)[:, 0].float(), chosen[part])
                    missing[part] &= ~inside
                    top = torch.maximum(highest[part], logits.amax(1).float())
                    base = top.masked_fill(top == -torch.inf, 0.0)  # where all so far is -inf the sum stays 0
                    scale = torch.exp(highest[part] - base)
                    total[part] = total[part] * scale + _less(logits, base).exp_().sum(1)
                    highest[part] = top
        of_all = highest + total.log()
        ctx.blocks, ctx.ignore_index = blocks, ignore_index
        ctx.has_bias = bias is not None
        ctx.save_for_backward(flat, labels, of_all, chosen, *(() if bias is None else (bias,)))
        return torch.where(counts, of_all - chosen, 0.0).masked_fill_(missing, torch.nan)  # beyond the vocabulary

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        flat, labels, of_all, chosen, *more = ctx.saved_tensors
        bias = more[0] if ctx.has_bias else None
        blocks, (wants_x, wants_weight, wants_bias) = ctx.blocks, ctx.needs_input_grad[:3]
        tokens = _TokenGradients(torch.where(labels != ctx.ignore_index, grad, 0.0), labels, of_all, chosen)
        signed = flat * tokens.sign[:, None].to(flat.dtype) if wants_weight else None
        dx = torch.zeros_like(flat, dtype=torch.float32) if wants_x else None
        db = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        of_weight = torch.empty_like(blocks.weight) if wants_weight and blocks.tiles is None else None
        parts = blocks.of_tokens(len(flat))
        for block in reversed(blocks.vocabulary):
            with block as rows, _gradient_of(block, of_weight) if wants_weight else nullcontext() as place:
                dw = ProductSum(place, len(parts)) if wants_weight else None
                for part in parts:
                    given = tokens.of_logits(blocks.logits(flat[part], rows, bias, block), part, block)
                    if wants_bias:
                        db[block.begin : block.end] += (given * tokens.sign[part, None]).sum(0)
                    given = given.to(flat.dtype)
                    if wants_x:
                        write_product(dx[part], given, rows.to(flat.dtype), holds=True)
                    if wants_weight:
                        dw.add(given.t(), signed[part])
                if wants_weight:
                    dw.finish()
        dx = dx.mul_(tokens.sign[:, None]).to(flat.dtype) if wants_x else None
        return dx, of_weight, db.to(bias.dtype) if wants_bias else None, None, None, None


class _TokenGradients:
    """The gradients of the logits of a block, given those of the tokens' losses.

    A token's own gradient has a sign and a size. The size goes into the exponent, exp(logit - of_all + log(size)),
    which saves a pass over the logits. The products that use the result apply the sign."""

    def __init__(self, grad, labels, of_all, chosen):
        size = grad.abs()
        self.sign = torch.where(grad < 0, -1.0, 1.0)
        self._labels = labels
        self._less = of_all - size.log()
        self._of_label = torch.expm1(chosen - of_all) * size

    def of_logits(self, logits, part, block):
        """In the logits' memory: (softmax - 1 at the label) times the size."""
        given = torch.exp(_less(logits, self._less[part]), out=logits)
        column, inside = _column(self._labels[part], block)
        of_label = torch.where(inside[:, None], self._of_label[part, None].to(given.dtype), given.gather(1, column))
        return given.scatter_(1, column, of_label)


def _column(labels, block):
    """[tokens, 1], where each token's label is in a block, and [tokens], whether it is there; else any column."""
    here = labels - block.begin
    rows = block.end - block.begin
    return here.clamp(0, rows - 1)[:, None], (here >= 0) & (here < rows)


def _less(logits, numbers):
    """fp32: logits less a number a token. In their memory where they are fp32; else the pass widens them, too."""
    return torch.sub(logits, numbers[:, None], out=logits if logits.dtype == torch.float32 else None)


_PLAIN = {"__get__", "__hash__", "dim", "is_complex", "is_floating_point", "ndimension", "nelement", "numel", "size"}
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data")}


class LazyLogits(torch.Tensor):
    """The output of a head in tiles within a transformers model: a tensor whose values are computed once, when an
    operation needs them. Its shape, dtype and device are known without. An operation that needs the values after the
    weights have changed raises UsageError. ``hidden``: tensor [..., width], the head's input."""

    @staticmethod
    def of(head, tiles, hidden):
        """The logits of ``head``, a torch.nn.Linear whose weight is in ``tiles``."""
        meta = torch.empty((*hidden.shape[:-1], tiles.rows), dtype=_dtype_of(hidden), device="meta")
        logits = torch.Tensor._make_subclass(LazyLogits, meta)
        logits.hidden, logits._head, logits._tiles, logits._found = hidden, head, tiles, None
        core = tiles[0].core
        logits._core, logits._steps = core and weakref.ref(core), core and core.global_steps
        return logits

    def values(self):
        """The logits, an ordinary tensor that autograd knows."""
        if self._found is None:
            core = self._core and self._core()
            if core is None or not core.alive or core.global_steps != self._steps:
                raise _C.UsageError(
                    "these logits were not computed, since the loss needs no logits of the whole vocabulary where the "
                    "head is in tiles, and the weights have changed meanwhile; ask for them before engine.step()")
            self._found = linear(self.hidden, self._tiles, self._head.bias)
        return self._found

    device = property(lambda self: self.hidden.device, doc="torch.device of the values.")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _PLAIN and func not in _VIEWS:
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.values() if isinstance(x, LazyLogits) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self):
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol):
        return self.values().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.values().detach().clone()


def _dtype_of(hidden):
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LazyHead:
    """Replaces the head's forward."""

    def __init__(self, head, tiles, before):
        self._head, self._tiles, self.__wrapped__ = head, tiles, before

    def __call__(self, hidden):
        # LazyLogits are for training, and torch.compile cannot trace a frame that gets them.
        if not torch.is_grad_enabled() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
            return self.__wrapped__(hidden)
        return LazyLogits.of(self._head, self._tiles, hidden)

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.__wrapped__, memo)


class _CausalLoss:
    """Transformers' ForCausalLMLoss, which does not compute the values of LazyLogits."""

    def __init__(self, plain):
        self._plain = plain

    @outside_graphs
    def __call__(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
                 **kwargs):  # fmt: skip
        if not isinstance(logits, LazyLogits) or logits._found is not None:
            return self._plain(logits, labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                               ignore_index=ignore_index, shift_labels=shift_labels, **kwargs)  # fmt: skip
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.hidden
        shift_labels = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = linear_cross_entropy(hidden, logits._head, shift_labels, None, ignore_index, reduction)
        if num_items_in_batch is None:
            return loss
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


def install(module, heads):
    """Makes a model of transformers compute its causal loss in this way, where its head is one of ``heads``,
    {id(torch.nn.Linear): Tiles of its weight}. Returns a function that undoes this, or None where ``module`` is no such
    model, or has another loss."""
    if not hasattr(module, "loss_function") or not hasattr(module, "get_output_embeddings"):
        return None
    from transformers.loss.loss_utils import ForCausalLMLoss  # the module is of transformers

    head = module.get_output_embeddings()
    if id(head) not in heads or isinstance(head.forward, _LazyHead) or module.loss_function is not ForCausalLMLoss:
        return None
    undo = ExitStack()
    undo.callback(replaced(module, "_loss_function", _CausalLoss(ForCausalLMLoss)))
    undo.callback(replaced(head, "forward", _LazyHead(head, heads[id(head)], head.__dict__["forward"])))
    return undo.close
