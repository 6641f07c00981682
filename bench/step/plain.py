"""Plain torch on every rank: a whole model in bf16 over fp32 masters and AdamW. Slow, and easy to believe."""

import math

from engines import ADAMW, Training, build_model


def plain_torch(context, other_order=False):
    """An engine: gradients are summed over ranks in fp32, in the order of ranks, and divided by their number; clipped
    by their norm, a sum in fp64; AdamW updates fp32 masters, which bf16 weights are rounded from.

    Args:
        other_order: the sum over ranks begins with the last one, and with the sequences of a batch by themselves, the
        last one first. That order is equally right; the distance of the two is the noise of training.
    """
    import torch

    model = build_model(context)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(masters, foreach=False, **ADAMW)

    def step(ids):
        parts = list(ids.split(1))[::-1] if other_order else [ids]
        loss = _add_gradients(model, parts, masters)
        _sum_over_ranks(context, masters, other_order)
        if context.clip:
            norm = math.sqrt(sum(m.grad.double().square().sum() for m in masters).item())
            for master in masters:
                master.grad *= min(1.0, context.clip / (norm + 1e-6))
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters):
                parameter.copy_(master)
        return loss

    return Training(step)


def _add_gradients(model, parts, masters):
    """The mean loss of ``parts`` of a batch; their mean gradient is that of the masters afterwards."""
    losses = []
    for part in parts:
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        (loss / len(parts) if len(parts) > 1 else loss).backward()
        losses.append(loss.detach())
        for parameter, master in zip(model.parameters(), masters):
            gradient = parameter.grad.float()
            master.grad = gradient if len(losses) == 1 else master.grad + gradient
            parameter.grad = None
    return sum(losses) / len(losses)


def _sum_over_ranks(context, masters, backwards):
    """The mean over ranks, in their order or backwards. Collective."""
    import torch
    import torch.distributed as dist

    for master in masters:
        of_ranks = [torch.empty_like(master.grad) for _ in range(context.world_size)]
        dist.all_gather(of_ranks, master.grad)
        total = None
        for gradient in of_ranks[::-1] if backwards else of_ranks:
            total = gradient if total is None else total + gradient
        master.grad = total * (1.0 / context.world_size)
