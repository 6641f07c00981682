"""Adagrad of ``deepspeed.ops.adagrad``, in torch's own operations."""

import torch

from .elementwise import ElementwiseOptimizer


class DeepSpeedCPUAdagrad(ElementwiseOptimizer):
    """Adagrad, computed in fp32. Works on any device, and in an engine on its fp32 shards. ``state`` has of each
    parameter ``step`` (int) and ``exp_avg_sq``, the sum of squares, of its shape. UsageError for ``amsgrad``,
    ``maximize``, ``lr_decay`` or ``initial_accumulator_value``, also in a param group.

    Args:
        model_params: parameters, or dicts of param groups; float32, bfloat16 or float16.
        lr, eps: floats, learning rate, and what is added to the denominator.
        weight_decay: float, added to the gradient times the weight.
        fp32_optimizer_states: False keeps the sums in the parameter's dtype.
    """

    moments = ("exp_avg_sq",)
    refused = ("amsgrad", "maximize", "lr_decay", "initial_accumulator_value")

    def __init__(self, model_params, lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def takes_sparse(self, gradient):
        """Rows of an embedding, without weight decay, which is for all rows."""
        return gradient.layout == torch.sparse_coo and not any(g["weight_decay"] for g in self.param_groups)

    def update(self, group, parameters, counts):
        dense = [p for p in parameters if not p.grad.is_sparse]
        if dense:
            super().update(group, dense, counts)
        for parameter in parameters:
            if parameter.grad.is_sparse:
                self._update_rows(group, parameter)

    def compute(self, group, weights, sums, gradients):
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        torch._foreach_addcmul_(sums, gradients, gradients)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(weights, gradients, denominators, -float(group["lr"]))

    def _update_rows(self, group, parameter):
        gradient = parameter.grad.coalesce()
        rows, values = tuple(gradient.indices()), gradient.values().float()
        kept = self.state[parameter]["exp_avg_sq"]
        sums = kept[rows].float().addcmul_(values, values)
        kept[rows] = sums.to(kept.dtype)
        weights = parameter[rows].float().addcdiv_(values, sums.sqrt_().add_(group["eps"]), value=-float(group["lr"]))
        parameter[rows] = weights.to(parameter.dtype)
