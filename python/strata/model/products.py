"""Matrix products that are written, or added, to where their result belongs: no temporary of the result's size, where
torch's BLAS can write it in the result's dtype.
"""

import torch


def write_product(target, one, other, holds=False, factor=1.0):
    """``target = factor * (one @ other)``, or with ``holds`` that plus what target holds.

    The BLAS does it all where the three have one dtype, and on GPUs where the target is fp32 and the others of 16 bits:
    the product is not rounded then before it is added. Elsewhere the product is rounded to the dtype of ``one`` first.

    Args:
        target: [m, n]; what lies in it does not matter without ``holds``, be it NaN.
        one: [m, k].
        other: [k, n], of its dtype.
        holds: bool.
        factor: float.
    """
    scale = factor if holds else 1.0
    if one.dtype == target.dtype:
        target.addmm_(one, other, beta=float(holds), alpha=scale)
    elif is_widened_by_blas(one, target):
        wide = target.dtype
        torch.ops.aten.addmm.dtype_out(target, one, other, wide, beta=float(holds), alpha=scale, out=target)
    elif holds:
        target.add_((one @ other).to(target.dtype), alpha=factor)
    else:
        target.copy_(one @ other)
    if not holds and factor != 1.0:  # afterwards: the bits that others get who multiply a gradient
        target.mul_(factor)


def is_widened_by_blas(one, target):
    """Whether the BLAS writes products of ``one``'s dtype in ``target``'s, which is wider."""
    return one.is_cuda and one.dtype.itemsize == 2 and target.dtype == torch.float32
