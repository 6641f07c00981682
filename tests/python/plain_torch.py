"""Training as plain torch does it, for all ranks in one process. Tests compare the engine with it.

It reduces in the engine's order. The gradient of a micro-step is the sum over ranks, in rank order, in
fp32, times 1/world; micro-steps add up; the norm is a sum of squares in fp64; weights are updated in fp32
and rounded to the model's dtype. Between GPUs the sum is rounded to the dtype of the rounded gradients.

The model is on the tests' device. The engine's own kernels have the CPU's arithmetic on every device, so their updates
run on the CPU here; other optimizers run where the model is, on both sides.
"""

import copy
import functools
import math
from contextlib import contextmanager

import torch
from devices import ON_GPU, test_device
from strata.ops.adam import adam_mode


class PlainTrainer:
    """A model trained by ``torch.optim`` on the summed gradients of ``world`` ranks' batches.

    Args:
        model: copied, and cast to ``dtype``; None: its parameters keep theirs, and are updated in fp32.
        make_optimizer: from fp32 parameters, in the order of ``model.parameters()``, to an optimizer.
        reduce_dtype: gradients are rounded to it before they are summed.
        grad_accum_dtype: the dtype of the sum over micro-steps.
        group_size: ranks of a shard group. Each group adds up its own gradients; the groups add up once, at the step.
        groups_at_once: the groups add up after every micro-step, as also where sums are kept in less than fp32.
        decay_unused: whether a parameter without a gradient is updated with one of zeroes; else it is not updated.
        on_host: whether the host runs the update of any optimizer, as where its states lie on the host.
    """

    def __init__(self, model, world, make_optimizer, dtype=torch.float32, clipping=0.0, accumulation=1,
                 reduce_dtype=torch.float32, grad_accum_dtype=torch.float32, loss_scale=1.0,
                 group_size=None, groups_at_once=False, decay_unused=False, on_host=False):
        self.model = copy.deepcopy(model).to(test_device())
        if dtype is not None:
            self.model.to(dtype)
        self.world, self.clipping, self.accumulation = world, clipping, accumulation
        self.reduce_dtype, self.grad_accum_dtype = reduce_dtype, grad_accum_dtype
        self.loss_scale, self.group_size, self.decay_unused = loss_scale, group_size or world, decay_unused
        self.groups_at_once = groups_at_once or grad_accum_dtype != torch.float32
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._make_optimizer(model, make_optimizer, torch.device("cpu"))
        if ON_GPU and not on_host and not _has_own_kernel(self.optimizer):
            self._make_optimizer(model, make_optimizer, test_device())
        self.drop_gradients()
        self.norm = None

    def _make_optimizer(self, model, make_optimizer, device):
        masters = copy.deepcopy(model).float().to(device)
        self.masters = [p for p in masters.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.masters)

    def micro_step(self, batches, loss_of):
        """Adds the gradients of one batch a rank; returns the losses."""
        losses, totals = [], []
        for rank, batch in enumerate(batches):
            loss = loss_of(self.model, batch)
            factor = self.loss_scale / self.accumulation
            self.model.zero_grad()  # to None
            (loss if factor == 1.0 else loss.float() * factor).backward()
            rounded = [
                (torch.zeros_like(p) if p.grad is None else p.grad).to(self.reduce_dtype).float()
                for p in self.parameters
            ]
            self.came = [came or p.grad is not None for came, p in zip(self.came, self.parameters)]
            if rank % self.group_size == 0:
                totals.append(rounded)
            else:
                totals[-1] = _added(totals[-1], rounded)
            losses.append(loss.item())
        means = [[g * (1.0 / self.world) for g in total] for total in totals]
        if self.groups_at_once:
            means = [_over_groups(means)]
        if self.sums_of_groups is None:
            sums = means
        else:
            sums = [_added([g.float() for g in old], new) for old, new in zip(self.sums_of_groups, means)]
        self.sums_of_groups = [[g.to(self.grad_accum_dtype) for g in of_group] for of_group in sums]
        self.sums = _over_groups(self.sums_of_groups)
        return losses

    def gradient_norm(self):
        """The norm of the accumulated gradients, before clipping."""
        squares = sum(g.double().square().sum().item() for g in self.sums)
        return math.sqrt(squares) / self.loss_scale

    def step(self, norm=None):
        """Updates the weights. ``norm``: the engine's, where the last bit of an fp64 sum should not count."""
        self.norm = self.gradient_norm()
        scale = 1.0 / self.loss_scale
        if self.clipping > 0.0:
            scale *= min(1.0, self.clipping / ((self.norm if norm is None else norm) + 1e-6))
        factor = torch.tensor(scale, dtype=torch.float32)
        for master, gradient, came in zip(self.masters, self.sums, self.came):
            counts = came or self.decay_unused
            master.grad = (gradient.float() * factor).to(master.device) if counts else None
        with exact_square_roots():
            self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
        self.drop_gradients()

    def drop_gradients(self):
        """A step that is skipped."""
        self.sums, self.sums_of_groups = [None] * len(self.masters), None
        self.came = [False] * len(self.masters)  # in some micro-step, on some rank

    def values(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def _added(first, second):
    return [a + b for a, b in zip(first, second)]


def _over_groups(of_groups):
    return functools.reduce(_added, of_groups)


def _has_own_kernel(optimizer):
    """Whether the engine computes this optimizer's update itself."""
    special = any(g.get("amsgrad") or g.get("maximize") for g in optimizer.param_groups)
    return adam_mode(optimizer) is not None or (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not special
    )


@contextmanager
def exact_square_roots():
    """Tensor.sqrt rounds correctly inside.

    The square root of torch's vector library is one unit in the last place off for some inputs on some
    processors; the engine's is IEEE's everywhere. Both are right answers, and only one is repeatable.
    """
    original = torch.Tensor.sqrt
    torch.Tensor.sqrt = lambda tensor: original(tensor.double()).to(tensor.dtype)
    try:
        yield
    finally:
        torch.Tensor.sqrt = original
