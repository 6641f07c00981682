"""A projection onto a vocabulary and its cross-entropy, without the logits of all tokens.

Where the weight is whole, ``whole_loss`` computes it. In tiles, and for a loss of each token, it takes a block of the
vocabulary and of the tokens at a time. Forward updates two numbers for each token: the maximum of its logits so far
and the sum of their exponentials relative to it (the online softmax of Milakov and Gimelshein, 2018). Both give the
logarithm of the sum of all exponentials. This logarithm and the logit of the token's label stay for backward, beside
the input. Backward computes each block's logits again and, in the same sweep, the gradients of the input and of the
block of weights. It needs the logarithm over the whole vocabulary, so forward cannot compute gradients on the way.
This takes four products where a loss that keeps its logits takes three; the memory of the logits is saved."""

import weakref
from contextlib import ExitStack, nullcontext

import torch
from torch.utils._pytree import tree_map

from .. import _C
from ..model.compiling import outside_graphs
from ..model.free_memory import MemoryChoice
from ..model.interception import replaced
from ..model.parameter import parameter_at
from ..model.tiles import Destination, ProductSum, tiles_of, write_product
from .whole_loss import DTYPES, whole_loss

_BLOCK_BYTES = 128 << 20  # of fp32 logits at once
_BLOCK_ROWS = 8192  # of a weight that is not in tiles


@outside_graphs
def linear_cross_entropy(hidden, weight, labels, bias=None, ignore_index=-100, reduction="mean", block_bytes=None,
                         scale=1.0, softcap=None):  # fmt: skip
    """``cross_entropy(scale * linear(hidden, weight, bias), labels)``, which never holds the logits of the whole
    vocabulary.

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
        block_bytes: int, the most bytes of logits that exist at once; None: 512 MiB, and 128 MiB of fp32 logits of
            tiles.
        scale: float, a factor of the logits, as Cohere's models have.
        softcap: float or None: scaled logits become ``softcap * tanh(logits / softcap)``, as in Gemma's models.
    """
    if isinstance(weight, torch.nn.Module):
        weight, bias = parameter_at(weight, "weight"), weight.bias if bias is None else bias
    tiles = tiles_of(weight) if isinstance(weight, torch.nn.Parameter) else None
    shape = weight.shape if tiles is None else tiles.shape
    if labels.shape != hidden.shape[:-1] or hidden.shape[-1] != shape[1]:
        raise _C.UsageError(f"linear_cross_entropy: wanted hidden [..., width], weight [vocabulary, width] and labels "
                            f"[...]; found {list(hidden.shape)}, {list(shape)} and {list(labels.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise _C.UsageError(f"linear_cross_entropy: reduction is 'mean', 'sum' or 'none'; found {reduction!r}")
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    flat = flat.to(_dtype_of(flat))
    counted = (classes != ignore_index).sum()
    if tiles is None and reduction != "none" and flat.dtype in DTYPES:
        total = whole_loss(flat, weight, bias, classes.long(), ignore_index, block_bytes, scale, softcap)
        return total if reduction == "sum" else total / counted
    blocks = _Blocks(weight, tiles, flat, block_bytes or _BLOCK_BYTES, scale, softcap)
    anchor = weight if tiles is None else tiles.anchor
    losses = _Losses.apply(flat, anchor, bias, classes, ignore_index, blocks)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / counted


class _Rows:
    """Rows [begin, end) of a whole weight: a context, as a tile is, in which it may have other memory each time."""

    def __init__(self, weight, begin, end):
        self._weight, self.begin, self.end = weight, begin, end

    def __enter__(self):
        return self._weight.detach()[self.begin : self.end]

    def __exit__(self, kind, value, traceback):
        pass


class _Blocks:
    """The blocks of the vocabulary and of the tokens."""

    def __init__(self, weight, tiles, flat, block_bytes, scale, softcap):
        self.tiles, self.weight = tiles, weight
        self._scale, self._softcap = scale, softcap
        self.dtype = flat.dtype
        rows = max((tile.rows for tile in tiles), default=1) if tiles is not None else min(_BLOCK_ROWS, len(weight))
        self.tokens = max(1, min(len(flat) or 1, block_bytes // (4 * max(1, rows))))
        if tiles is None:
            self.vocabulary = [_Rows(weight, begin, min(begin + rows, len(weight)))
                               for begin in range(0, len(weight), max(1, rows))]  # fmt: skip
        else:
            self.vocabulary = list(tiles)

    def of_tokens(self, count):
        """[slice]."""
        return [slice(begin, min(begin + self.tokens, count)) for begin in range(0, count, self.tokens)]

    def logits(self, x, weight, bias, block):
        """[tokens, rows of the block], of hidden's dtype where they are the product alone, else fp32."""
        found = x @ weight.to(self.dtype).t()
        if bias is not None:
            found = found.float().add_(bias[block.begin : block.end].float())
        if self._scale != 1.0:
            found = found.float().mul_(self._scale)
        return found if self._softcap is None else torch.tanh(found.float() / self._softcap).mul_(self._softcap)

    def slope(self, logits):
        """The derivative of ``logits`` by what the product gave; None: 1."""
        if self._softcap is None:
            return None if self._scale == 1.0 else self._scale
        return (1 - (logits / self._softcap).square_()).mul_(self._scale)


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
                    logits = blocks.logits(flat[part], rows, bias, block)
                    slope = blocks.slope(logits)
                    given = tokens.of_logits(logits, part, block)
                    given = given if slope is None else given * slope
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


_PRODUCTS, _QUOTIENTS = {"mul", "__mul__", "__rmul__", "multiply"}, {"div", "__truediv__", "true_divide", "divide"}
_PLAIN = {"__hash__", "dim", "is_complex", "is_floating_point", "ndimension", "nelement", "numel", "size"}
_PLAIN_ATTRIBUTES = {"shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "names", "requires_grad", "is_sparse"}


class LazyLogits(torch.Tensor):
    """The output of a head within a transformers model: a tensor whose values are computed once, when an operation
    needs them. Its shape, dtype and device are known without. An operation that needs the values after the weights have
    changed, or ``hidden`` has, raises UsageError. A factor and a tanh, which some models apply, give other LazyLogits.
    ``hidden``: tensor [..., width], the head's input. ``scale``, ``softcap``: as of ``linear_cross_entropy``.
    ``has_loss``: whether a loss was computed without their values."""

    @staticmethod
    def of(head, hidden, scale=1.0, softcap=None, make=None):
        """The logits of a ``_LazyHead``. ``make()``: their values; None: those of the head."""
        meta = torch.empty((*hidden.shape[:-1], head.rows), dtype=_dtype_of(hidden), device="meta")
        # They require a gradient: a custom autograd function, which gets them without values, fails in backward.
        logits = torch.Tensor._make_subclass(LazyLogits, meta, True)
        logits.hidden, logits.head, logits._found, logits.has_loss = hidden, head, None, False
        logits._version_of_hidden = hidden._version
        kind = hidden.device.type
        logits._autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        logits.scale, logits.softcap, logits._make = scale, softcap, make or (lambda: head.__wrapped__(hidden))
        core = head.core()
        logits._core, logits._steps = core and weakref.ref(core), core and core.global_steps
        return logits

    def values(self):
        """The logits, an ordinary tensor that autograd knows."""
        if self._found is None:
            core = self._core and self._core()
            if core is None or not core.alive or core.global_steps != self._steps:
                raise _C.UsageError(
                    "these logits were not computed, since the loss needs no logits of the whole vocabulary, and the "
                    'weights have changed meanwhile; ask for them before engine.step(), or write "strata": {"loss": '
                    '"plain"} where the head is not in tiles')
            self.require_input()
            kind = self.hidden.device.type
            with torch.enable_grad(), torch.autocast(kind, cache_enabled=False, **self._autocast):  # as in forward
                self._found = self._make()
        return self._found

    def require_input(self):
        """UsageError where ``hidden`` is no longer what the head got."""
        if self.hidden._version != self._version_of_hidden:
            raise _C.UsageError("these logits were not computed, and the input of their head was changed in place "
                                "meanwhile; change a copy of it, or ask for the logits before")

    def _changed(self, name, number=None, *more):
        """Those that the operation ``name`` makes of these; None: it is another one than a factor or the first tanh."""
        scale, softcap = self.scale, self.softcap
        if self._found is not None:  # a script may have changed them in place
            return None
        if name == "tanh" and number is None and softcap is None:
            softcap = 1.0
        elif isinstance(number, (int, float)) and number and not more and name in _PRODUCTS | _QUOTIENTS:
            factor = number if name in _PRODUCTS else 1 / number
            scale, softcap = scale * factor, softcap and softcap * factor
        else:
            return None
        given = () if number is None else (number,)
        return LazyLogits.of(self.head, self.hidden, scale, softcap, lambda: getattr(self._make(), name)(*given))

    device = property(lambda self: self.hidden.device, doc="torch.device of the values.")
    is_cuda = property(lambda self: self.hidden.is_cuda, doc="Whether the values are on a GPU.")
    is_cpu = property(lambda self: self.hidden.is_cpu, doc="Whether the values are on the host.")
    is_meta = property(lambda self: False, doc="False: there are values.")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        plain = getattr(func.__self__, "__name__", "") in _PLAIN_ATTRIBUTES if name == "__get__" else name in _PLAIN
        if plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in ("retain_grad", "register_hook") and args[0].has_loss:
            raise _C.UsageError(f"{name}() of logits whose loss was computed without them: they get no gradient of it. "
                                'Write "strata": {"loss": "plain"}')
        changed = args[0]._changed(name, *args[1:]) if not kwargs and isinstance(args[0], LazyLogits) else None
        if changed is not None:
            return changed
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
    """Replaces the forward of ``head``. ``rows``: of its weight. ``core()``: its _C.ShardedModel.
    ``wants(hidden, rows)``: whether its logits are lazy."""

    def __init__(self, head, rows, core, wants):
        self.__wrapped__, self.rows, self.core, self._wants = head.__dict__["forward"], rows, core, wants
        self._head = head

    def __call__(self, input):  # noqa: A002 - the parameter's name of torch.nn.Linear
        # LazyLogits are for training, and neither torch.compile nor a hook of backward can take them.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.__wrapped__(input)
        hooks = self._head._backward_hooks or self._head._backward_pre_hooks
        if hooks or torch._C._dynamo.eval_frame.get_eval_frame_callback() or not self._wants(input, self.rows):
            return self.__wrapped__(input)
        return LazyLogits.of(self, input)

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


class _LossOfHead:
    """Stands below a whole head's forward, within its scope, where its weight is whole: computes the loss there."""

    def __init__(self, head):
        self._head, self.__wrapped__ = head, head.forward

    @outside_graphs  # as a head by itself is without this
    def __call__(self, hidden, loss_of=None):
        if loss_of is None:
            return self.__wrapped__(hidden)
        return linear_cross_entropy(hidden, self._head, *loss_of)

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


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
        logits.require_input()
        hidden, logits.has_loss = logits.hidden, True
        shift_labels = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = logits.head.loss(hidden, shift_labels, None, ignore_index, reduction, None, logits.scale, logits.softcap)
        if num_items_in_batch is None:
            return loss
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


def _head_of(module):
    """The output head of a causal model of transformers with its own loss; else None."""
    if not hasattr(module, "loss_function") or not hasattr(module, "get_output_embeddings"):
        return None
    from transformers.loss.loss_utils import ForCausalLMLoss  # the module is of transformers

    head = module.get_output_embeddings()
    plain = module.loss_function is ForCausalLMLoss and head is not None
    return head if plain and not isinstance(head.forward, _LazyHead) else None


def _install(module, head, lazy):
    from transformers.loss.loss_utils import ForCausalLMLoss

    undo = ExitStack()
    undo.callback(replaced(module, "_loss_function", _CausalLoss(ForCausalLMLoss)))
    undo.callback(replaced(head, "forward", lazy))
    return undo.close


def install(module, heads):
    """Makes a model of transformers compute its causal loss in this way, where its head is one of ``heads``,
    {id(torch.nn.Linear): Tiles of its weight}. Returns a function that undoes this, or None where ``module`` is no such
    model, or has another loss."""
    head = _head_of(module)
    if head is None or id(head) not in heads:
        return None
    tiles = heads[id(head)]
    lazy = _LazyHead(head, tiles.rows, lambda: tiles[0].core, lambda *_: True)
    lazy.loss = lambda hidden, *rest: linear_cross_entropy(hidden, head, *rest)
    return _install(module, head, lazy)


class WholeHeads:
    """The heads of transformers' causal models among ``modules`` whose weight is no tile. Made before an engine
    intercepts the modules, so that a loss is computed within the head's scope; ``install`` comes afterwards.
    ``undo()`` is for after the engine has let go of them. ``loss``: "fused": the loss never holds all logits; "auto":
    not where they would take too much memory."""

    def __init__(self, modules, loss):
        self._fused, self._choice, self._undo = loss == "fused", MemoryChoice(share=1 / 2), ExitStack()
        heads = ((module, _head_of(module)) for module in modules)
        self._heads = {}  # {head: the models that have it: PEFT's wrappers pass on the names of theirs}
        for module, head in heads:
            if type(head) is torch.nn.Linear and (head in self._heads or "forward" not in head.__dict__):
                self._heads.setdefault(head, []).append(module)
        for head in self._heads:
            self._undo.callback(replaced(head, "forward", _LossOfHead(head)))
        self.undo = self._undo.close

    def install(self, core):
        """Makes the models' losses lazy, for the engine of ``core``. Returns a function that undoes this."""
        undo, core = ExitStack(), weakref.ref(core)
        for head, modules in self._heads.items():
            before = head.__dict__["forward"]
            lazy = _LazyHead(head, head.out_features, core, self._wants)
            lazy.loss = lambda hidden, *rest, before=before: before(hidden, loss_of=rest)
            for module in modules:
                undo.callback(_install(module, head, lazy))
        return undo.close

    def _wants(self, hidden, rows):
        need = 12 * rows * (hidden.numel() // hidden.shape[-1])  # of logits, what the loss makes of them, and gradients
        return self._fused or self._choice.spares(need, hidden.device)
