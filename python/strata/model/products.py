"""Matrix products that torch's BLAS writes, or adds, directly to their target. There is no temporary of the result's
size where the BLAS can write the target's dtype.
"""

import torch


def write_product(target, one, other, holds=False, factor=1.0):
    """``target = factor * (one @ other)``, or with ``holds`` ``target += factor * (one @ other)``.

    The BLAS does it all where the three have one dtype, and on GPUs where the target is fp32 and the others have 16
    bits; the product is not rounded before the addition then. Elsewhere the product is first rounded to the dtype of
    ``one``.

    Args:
        target: [m, n]; without ``holds`` its present values, also NaN, have no effect.
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
    if not holds and factor != 1.0:  # afterwards, to get the same bits as a gradient that is multiplied by a factor
        target.mul_(factor)


def is_widened_by_blas(one, target):
    """Whether the BLAS writes products of ``one``'s dtype in ``target``'s, which is wider."""
    return one.is_cuda and one.dtype.itemsize == 2 and target.dtype == torch.float32
