"""Norms over plain tensors that scripts import from DeepSpeed. The engine itself clips by ``gradient_clipping``."""

import torch


def get_grad_norm(parameters, norm_type=2, mpu=None):
    """float: the norm of the gradients that these parameters have on this rank."""
    return _norm([p.grad for p in _listed(parameters) if p.grad is not None], norm_type)


def get_weight_norm(parameters, norm_type=2, mpu=None):
    """float: the norm of the parameters that are whole on this rank; others count as empty."""
    return _norm([p.detach() for p in _listed(parameters)], norm_type)


def get_global_norm(norm_list):
    """float: the L2 norm of all tensors together, from the norm of each."""
    return sum(float(norm) ** 2 for norm in norm_list) ** 0.5


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    """``torch.nn.utils.clip_grad_norm_``, between backward and step. At stage 3 on several ranks an engine's ``.grad``
    cannot be read: ``gradient_clipping`` of the configuration clips at every stage."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _listed(parameters):
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _norm(tensors, norm_type):
    return float(torch.nn.utils.get_total_norm(tensors, norm_type)) if tensors else 0.0
