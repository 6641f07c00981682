"""A projection onto a vocabulary and its cross-entropy where the weight is whole, a block of tokens at a time.

Each block has the logits of the whole vocabulary. One kernel makes of them the losses and, in their memory, their
gradients; two more products make those of the input and of the weight, all in forward (as in Liger, Hsu et al., 2024).
So there are three products, as in a loss that keeps all logits. Backward multiplies the gradients by that of the sum.
"""

import functools

import torch

from .. import _C
from ..model.tiles import write_product

_BLOCK_BYTES = 512 << 20  # of logits at once
_TOKENS = 128  # a block is a multiple of this
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of logits


@functools.lru_cache
def _kernel(device):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return _C.VocabularyLosses(device, world)


def whole_loss(flat, weight, bias, labels, ignore_index, block_bytes, scale, softcap):
    """The sum of the losses of all tokens, fp32. ``flat``: [tokens, width] of one of DTYPES. ``weight``:
    [vocabulary, width]. ``bias``: [vocabulary] or None. ``labels``: [tokens], int64. ``block_bytes``: the most bytes of
    logits at once; None: 512 MiB."""
    tokens = max(1, (block_bytes or _BLOCK_BYTES) // (max(1, len(weight)) * flat.dtype.itemsize))
    tokens = tokens // _TOKENS * _TOKENS or tokens
    return _WholeLoss.apply(flat, weight, bias, labels, ignore_index, tokens, scale, softcap or 0.0,
                            torch.is_grad_enabled())  # fmt: skip


class _WholeLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat, weight, bias, labels, ignore_index, tokens, scale, softcap, has_graph):
        wants_x, wants_weight, wants_bias = wants = [has_graph and wanted for wanted in ctx.needs_input_grad[:3]]
        flat, labels, count = flat.contiguous(), labels.contiguous(), len(flat)
        rows, kernel = weight.detach().to(flat.dtype), _kernel(flat.device)
        losses = flat.new_empty((count,), dtype=torch.float32)
        logits = flat.new_empty((min(tokens, count), len(rows)))
        # One product is rounded once; the sum of several is fp32.
        wide = torch.float32 if count > tokens else flat.dtype
        dx = torch.empty_like(flat) if wants_x else None
        dw = (flat.new_empty if count else flat.new_zeros)(rows.shape, dtype=wide) if wants_weight else None
        db = flat.new_zeros(bias.shape, dtype=torch.float32) if wants_bias else None
        for begin in range(0, count, tokens):
            part = slice(begin, min(begin + tokens, count))
            here = logits[: part.stop - begin]
            if bias is None:
                torch.mm(flat[part], rows.t(), out=here)
            else:
                torch.addmm(bias.detach().to(flat.dtype), flat[part], rows.t(), out=here)
            kernel(here, labels[part], losses[part], ignore_index, scale, softcap, any(wants))
            if wants_x:
                torch.mm(here, rows, out=dx[part])
            if wants_weight:
                write_product(dw, here.t(), flat[part], holds=begin > 0)
            if wants_bias:
                db += here.sum(0, dtype=torch.float32)
        ctx.dtypes = (flat.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(dx, dw, db)
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # A factor with a dimension keeps fp32 beside tensors of 16 bits; one without takes their dtype.
        factor = grad.float().reshape(1)
        given = (None if tensor is None else torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))
                 for tensor, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))  # fmt: skip
        return *given, None, None, None, None, None, None
