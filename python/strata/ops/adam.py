"""Adam and AdamW of ``deepspeed.ops.adam``: on the host by the engine's own kernel, on a GPU by torch's fused one."""

import inspect

import torch

from .. import _C
from ..ranks.runtime import rank_and_world_size
from .elementwise import ElementwiseOptimizer, described

# A number of steps after which no beta below 1 leaves anything to correct.
_NO_CORRECTION = 1e30


class _Adam(ElementwiseOptimizer):
    moments = ("exp_avg", "exp_avg_sq")
    _host = None  # the threads, from the first step on

    def __init__(self, params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, fp32_states):
        self.adam_w_mode = bool(adam_w_mode)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "bias_correction": bias_correction, "amsgrad": amsgrad}  # fmt: skip
        super().__init__(params, defaults, fp32_states)

    def update(self, group, parameters, counts):
        if self._host is None:
            self._host = _C.HostAdam(rank_and_world_size()[1])
        states = [self.state[p] for p in parameters]
        tensors = [(p, p.grad, state["exp_avg"], state["exp_avg_sq"], count)
                   for p, state, count in zip(parameters, states, counts, strict=True)]  # fmt: skip
        beta1, beta2 = group["betas"]
        self._host.step(tensors, float(group["lr"]), float(beta1), float(beta2), float(group["eps"]),
                        float(group["weight_decay"]), self.adam_w_mode, bool(group["bias_correction"]))


class DeepSpeedCPUAdam(_Adam):
    """Adam and AdamW over parameters in host memory, in one pass on all cores of the rank. ``state`` has of each
    parameter ``step`` (int), ``exp_avg`` and ``exp_avg_sq``, of its shape. UsageError for ``amsgrad`` or ``maximize``,
    also in a param group.

    The bits are those of the engine's Adam (``strata::kernels::adam_step``): computed in fp32, 16-bit weights rounded
    once a step. Given to ``strata.initialize``, the engine updates its shards with these settings instead, wherever
    they lie. Where ranks share a host, each takes its part of the cores, and the threads are bound to them.

    Args:
        model_params: parameters, or dicts of param groups; float32, bfloat16 or float16, in any mix, on the CPU. They
            need not be contiguous; others are copied for the update.
        lr, weight_decay: floats.
        bias_correction: bool; False uses the moments uncorrected.
        betas, eps: (float, float), decay of the two moments; float, added to the denominator.
        adamw_mode: True decays weights apart from the gradient (AdamW), False adds the decay to it (Adam).
        fp32_optimizer_states: False keeps moments in the parameter's dtype; in fp32 they are more exact. In an engine
            the configuration decides.
    """

    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                 amsgrad=False, adamw_mode=True, fp32_optimizer_states=True):  # fmt: skip
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode,
                         fp32_optimizer_states)  # fmt: skip

    def _check(self, parameter):
        super()._check(parameter)
        if parameter.device.type != "cpu":
            raise _C.UsageError("DeepSpeedCPUAdam updates parameters in host memory; take FusedAdam, or give the "
                                f"optimizer to strata.initialize before its first step; found {described(parameter)}")


class FusedAdam(_Adam):
    """Adam and AdamW over parameters on GPUs, in few kernels; those in host memory are updated as by DeepSpeedCPUAdam,
    whose errors and other arguments this class has. States have the parameter's dtype.

    On a GPU this is torch's fused Adam over the whole list, which computes in fp32 and rounds once, too. Given to
    ``strata.initialize``, the engine's own kernel does it. ``adam_w_mode``: True: AdamW; False: Adam.
    ``set_grad_none``: the default of ``zero_grad()``: True drops gradients, False zeroes them."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True):  # fmt: skip
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, False)

    def update(self, group, parameters, counts):
        on_host, on_gpus = [], {}
        for parameter, count in zip(parameters, counts, strict=True):
            if parameter.device.type == "cpu":
                on_host.append((parameter, count))
            else:
                on_gpus.setdefault((parameter.device, parameter.dtype, count), []).append(parameter)
        if on_host:
            super().update(group, *zip(*on_host, strict=True))
        for (device, _, count), members in on_gpus.items():
            self._update_on_gpu(group, members, count, device)

    def _update_on_gpu(self, group, parameters, count, device):
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        # Filled on the device: a copy from the host would wait. The kernel reads fp32.
        number = count if group["bias_correction"] else _NO_CORRECTION
        counted = torch.full((), number, dtype=torch.float32, device=device)
        (torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_)(
            parameters, [_laid_out_as(p, p.grad) for p in parameters], [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states], [], [counted] * len(parameters), lr=float(group["lr"]),
            beta1=float(beta1), beta2=float(beta2), weight_decay=float(group["weight_decay"]), eps=float(group["eps"]),
            amsgrad=False, maximize=False)


def _laid_out_as(parameter, gradient):
    alike = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return gradient if alike else torch.empty_like(parameter).copy_(gradient)


_UPDATES = (_Adam.update, FusedAdam.update)


def adam_mode(optimizer):
    """The update that the engine computes in place of the optimizer: "adamw" or "adam"; None for other classes, and for
    subclasses with an update of their own."""
    if not isinstance(optimizer, _Adam):
        return None
    kind = type(optimizer)
    same_step = inspect.unwrap(kind.step) is inspect.unwrap(ElementwiseOptimizer.step)  # torch wraps it to profile it
    mode = "adamw" if optimizer.adam_w_mode else "adam"
    return mode if same_step and kind.update in _UPDATES else None
