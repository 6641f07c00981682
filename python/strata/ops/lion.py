"""Lion of ``deepspeed.ops.lion``, in torch's own operations. Idea: Chen et al. 2023."""

import torch

from .elementwise import ElementwiseOptimizer


class _Lion(ElementwiseOptimizer):
    moments = ("exp_avg",)

    def compute(self, group, weights, averages, gradients):
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        directions = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-lr)
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, gradients, alpha=1 - beta2)


class DeepSpeedCPULion(_Lion):
    """Lion, computed in fp32. Works on any device, and in an engine on its fp32 shards. ``state`` has of each parameter
    ``step`` (int) and ``exp_avg``, of its shape. UsageError for ``amsgrad`` or ``maximize`` in a param group.

    Args:
        model_params: parameters, or dicts of param groups; float32, bfloat16 or float16.
        lr: float, learning rate: the distance by which each weight moves in a step.
        betas: (float, float): of the direction, and of the average that is kept.
        weight_decay: float, apart from the gradient.
        fp32_optimizer_states: False keeps the average in the parameter's dtype.
    """

    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_optimizer_states)


class FusedLion(_Lion):
    """The same with the average in the parameter's dtype. ``set_grad_none``: the default of ``zero_grad()``: True drops
    gradients, False zeroes them."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, False)
