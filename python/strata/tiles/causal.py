"""Transformers' causal loss without the logits of the whole vocabulary, where the head is in tiles.

The head returns ``LazyLogits``, which are computed when an operation needs their values. The model's loss function
takes them uncomputed, and computes the loss of the head's input by ``linear_cross_entropy``.
"""

import weakref

import torch
from torch.utils._pytree import tree_map

from .. import _C
from .functions import linear
from .vocabulary_loss import linear_cross_entropy

_PLAIN = {"__get__", "__hash__", "dim", "is_complex", "is_floating_point", "ndimension", "nelement", "numel", "size"}
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data")}


class LazyLogits(torch.Tensor):
    """The output of a head in tiles within a transformers model: a tensor whose values are computed once, when an
    operation needs them. Its shape, dtype and device are known without. An operation that needs the values after the
    weights have changed raises UsageError.

    Attributes:
        hidden: tensor [..., width], the head's input.
    """

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
                    "head is in tiles, and the weights have changed meanwhile; ask for them before engine.step()"
                )
            self._found = linear(self.hidden, self._tiles, self._head.bias)
        return self._found

    @property
    def device(self):
        """torch.device of the values."""
        return self.hidden.device

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _PLAIN and func not in _VIEWS:
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_valued, (args, kwargs or {}))
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


def _valued(item):
    return item.values() if isinstance(item, LazyLogits) else item


class _LazyHead:
    """Replaces the head's forward."""

    def __init__(self, head, tiles, before):
        self._head, self._tiles, self.before = head, tiles, before
        self.__wrapped__ = before

    def __call__(self, hidden):
        if not torch.is_grad_enabled():  # the result is not for training
            return self.before(hidden)
        return LazyLogits.of(self._head, self._tiles, hidden)

    def __deepcopy__(self, memo):
        import copy

        return copy.deepcopy(self.before, memo)


class _CausalLoss:
    """Transformers' ForCausalLMLoss, which does not compute the values of LazyLogits."""

    def __init__(self, plain):
        self._plain = plain

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
    """Makes a model of transformers compute its causal loss in this way, where its head is one of ``heads``.

    Args:
        module: any module.
        heads: {id(torch.nn.Linear): Tiles of its weight}.

    Returns:
        a function that undoes this, or None: the module is no such model, or has another loss.
    """
    if not hasattr(module, "loss_function") or not hasattr(module, "get_output_embeddings"):
        return None
    from transformers.loss.loss_utils import ForCausalLMLoss  # the module is of transformers

    head = module.get_output_embeddings()
    if id(head) not in heads or isinstance(head.forward, _LazyHead) or module.loss_function is not ForCausalLMLoss:
        return None
    before = head.__dict__["forward"]
    head.__dict__["forward"] = _LazyHead(head, heads[id(head)], before)
    had = module.__dict__.get("_loss_function")
    module.loss_function = _CausalLoss(ForCausalLMLoss)

    def take_back():
        head.__dict__["forward"] = before
        if had is None:
            module.__dict__.pop("_loss_function", None)
        else:
            module.loss_function = had

    return take_back
