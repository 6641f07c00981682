"""Small functions over tensors in lists, tuples and dicts, that scripts import from DeepSpeed."""

import os
import random

import torch


def _mapped(item, function):
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, dict):
        mapped = {key: _mapped(value, function) for key, value in item.items()}
        return mapped if type(item) is dict else _as(item, mapped)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(value, function) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(value, function) for value in item)
    return item


def _as(item, mapped):
    try:
        return type(item)(mapped)
    except TypeError:
        return mapped


def clone_tensors_for_torch_save(item, device=torch.device("cpu")):
    """``item`` with copies of its tensors in memory of their own size, so that ``torch.save`` writes no more.

    Args:
        item: a tensor, or lists, tuples and dicts of such.
        device: of the copies. Copies share no memory with each other.
    """
    return _mapped(item, lambda tensor: tensor.detach().clone().to(device))


def move_to_device(item, device, criterion_func=None):
    """``item`` with its tensors on ``device``; with ``criterion_func`` those for which it is true."""
    return _mapped(item, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t)


def copy_to_device(item, device, criterion_func):
    """A copy of ``item``'s structure, whose tensors for which ``criterion_func`` is true are on ``device``."""
    return move_to_device(item, device, criterion_func)


def get_model_ckpt_name_for_rank(base_folder, mp_rank_str):
    """str: the path of DeepSpeed's model file for a rank of model parallelism."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def ensure_directory_exists(filename):
    """Makes the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def set_random_seed(seed):
    """Seeds Python's, NumPy's and torch's random numbers."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def as_it_is(function):
    """The function itself."""
    return function
