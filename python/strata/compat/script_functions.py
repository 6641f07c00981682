"""Small functions that scripts import from DeepSpeed: over tensors in lists and dicts, norms, modules by paths,
experts, and the level of the logger."""

import logging
import operator
import os
import random

import numpy
import torch

from ..model.interception import map_tensors
from ..rank_logging import logger


def clone_tensors_for_torch_save(item, device=torch.device("cpu")):
    """``item``, a tensor, or lists, tuples and dicts of such, with copies on ``device`` of its tensors in memory of
    their own size, which they do not share, so that ``torch.save`` writes no more."""
    return map_tensors(item, lambda tensor: tensor.detach().clone().to(device))


def move_to_device(item, device, criterion_func=None):
    """``item`` with its tensors on ``device``; with ``criterion_func`` those for which it is true."""
    return map_tensors(item, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t)


def get_model_ckpt_name_for_rank(base_folder, mp_rank_str):
    """str: the path of DeepSpeed's model file for a rank of model parallelism."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def ensure_directory_exists(filename):
    """Makes the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def set_random_seed(seed):
    """Seeds Python's, NumPy's and torch's random numbers."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def as_it_is(value):
    """The function, or the parameters or param groups, themselves."""
    return value


# --- norms over plain tensors; the engine itself clips by ``gradient_clipping`` ---


def get_grad_norm(parameters, norm_type=2, mpu=None):
    """float: the norm of the gradients that these parameters have on this rank."""
    gradients = [p.grad for p in _listed(parameters) if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients, norm_type))


def get_weight_norm(parameters, norm_type=2, mpu=None):
    """float: the norm of the parameters that are whole on this rank; others count as empty."""
    return float(torch.nn.utils.get_total_norm([p.detach() for p in _listed(parameters)], norm_type))


def get_global_norm(norm_list):
    """float: the L2 norm of all tensors together, from the norm of each."""
    return sum(float(norm) ** 2 for norm in norm_list) ** 0.5


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    """``torch.nn.utils.clip_grad_norm_``, between backward and step. At stage 3 on several ranks an engine's ``.grad``
    cannot be read: ``gradient_clipping`` of the configuration clips at every stage."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _listed(parameters):
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


# --- attributes by dotted paths, as DeepSpeed-Chat's scripts look for modules to replace ---


def recursive_getattr(model, module_name):
    """The attribute of ``model`` at "layers.0.up", or AttributeError; numbers are members of a ModuleList."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model, module_name, module):
    """Sets the attribute of ``model`` at a path, or AttributeError where a part before the last does not exist."""
    path, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, path) if path else model, name, module)


# --- ``deepspeed.moe.utils``: no model contains DeepSpeed's layers of experts, which Strata does not have ---


def is_moe_param(param):
    """bool: whether a parameter belongs to DeepSpeed's experts: its ``allreduce`` is False."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(m):
    """(False, 0): a model has none of DeepSpeed's layers of experts."""
    return False, 0


def is_moe_param_group(param_group):
    """bool: whether a param group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=178956971):
    """[param group]: the same groups, one or several, since no parameter belongs to DeepSpeed's experts;
    NotImplementedError for one that does. ``max_group_size`` has no effect."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(p) for group in groups for p in group["params"] if hasattr(p, "allreduce")):
        raise NotImplementedError("Strata does not offer expert parallelism; models' own experts are trained")
    return groups


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Sets the level: "debug", "info", "warning", "error" or "critical"; ValueError for another name."""
    (custom_logger or logger).setLevel(_level(log_level_str))


def should_log_le(max_log_level_str):
    """bool: whether the logger's level is at most the level of this name."""
    return logger.getEffectiveLevel() <= _level(max_log_level_str)


def _level(name):
    level = logging.getLevelName(str(name).upper())
    if not isinstance(level, int):
        raise ValueError(f"'{name}' is no level of logging; wanted debug, info, warning, error or critical")
    return level
