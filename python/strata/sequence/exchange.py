"""The exchanges of a sequence group. A rank has all heads of its tokens outside of attention, and all tokens of its
heads within: both directions are one all-to-all of equal parts, whose backward is the same again. At the end the ranks
bring their losses together. After DeepSpeed's Ulysses (arXiv 2309.14509)."""

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """[ranks, ...] -> [ranks, ...]: row r goes to rank r of the group, and comes from there."""

    @staticmethod
    def forward(ctx, rows, sequence):
        ctx.sequence = sequence
        received = torch.empty_like(rows)
        with sequence.exchanging():
            dist.all_to_all_single(received, rows, group=sequence.group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient.contiguous(), ctx.sequence), None


def heads_for_tokens(tensors, sequence):
    """For each of ``tensors``, [batch, heads, tokens of this rank, size] in the same dtype, its part for attention:
    [batch, heads / ranks, tokens of all ranks in their order, size]. Where ranks are a multiple of a tensor's heads,
    heads repeat, and a rank gets the one that belongs to its part of more heads. ``sequence``: the
    ``SequenceGroup``. Collective."""
    ranks = sequence.size
    rows, shapes = [], []
    for tensor in tensors:
        if tensor.shape[1] % ranks:
            tensor = tensor.repeat_interleave(ranks // tensor.shape[1], dim=1)
        tensor = tensor.unflatten(1, (ranks, -1)).movedim(1, 0)
        shapes.append(tensor.shape)
        rows.append(tensor.reshape(ranks, -1))
    received = _AllToAll.apply(torch.cat(rows, dim=1), sequence)
    parts = received.split([row.shape[1] for row in rows], dim=1)
    return [part.view(shape).movedim(0, 2).flatten(2, 3) for part, shape in zip(parts, shapes)]


def tokens_for_heads(output, sequence):
    """[batch, tokens of all ranks, heads of this rank, size] -> [batch, tokens of this rank, all heads, size].
    ``sequence``: the ``SequenceGroup``. Collective."""
    rows = output.unflatten(1, (sequence.size, -1)).movedim(1, 0).contiguous()
    return _AllToAll.apply(rows, sequence).movedim(0, 2).flatten(2, 3)


def group_loss(loss, shift_labels, sequence, mean=True):
    """The mean over the labels of all ranks of a ``SequenceGroup``, from each rank's mean over its own: a tensor of no
    dimension. Its gradient is ``sequence.size`` times this rank's share, so that the mean over all ranks, which an
    engine takes, is the mean of the rows' gradients. 0 where no rank has labels. Collective.

    Args:
        loss: this rank's mean; NaN where it has no labels.
        shift_labels: integers of any shape; -100 is no label.
        mean: False: ``loss`` is this rank's sum, over a number that all ranks have, and so is the result the group's.
    """
    count = (shift_labels != -100).sum() if mean else torch.ones((), device=loss.device)
    own = torch.where(count > 0, loss, 0.0) * count
    sums = torch.stack([own.detach().double(), count.double()])
    with sequence.exchanging():
        dist.all_reduce(sums, group=sequence.group)
    divisor = sums[1].clamp(min=1) if mean else 1.0
    share = own * torch.as_tensor(sequence.size / divisor).to(own)
    return share + ((sums[0] / divisor).to(own.dtype) - share.detach())
