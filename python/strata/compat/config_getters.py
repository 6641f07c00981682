"""Functions of DeepSpeed that read single settings from the dict of a configuration."""

import torch


def get_gradient_clipping(param_dict):
    """float: ``gradient_clipping``, 1.0 where it is not given."""
    return param_dict.get("gradient_clipping", 1.0)


def get_log_level(param_dict):
    """str or None: ``log_level``."""
    return param_dict.get("log_level")


def get_lr_from_config(config):
    """(float, ""): the first rate of a section ``scheduler``, a dict; (None, the reason) where it names none."""
    params = config.get("params")
    if "type" not in config or params is None:
        return None, "the section has no type, or no params"
    first = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(config["type"], "warmup_max_lr")
    return params.get(first), ""


def get_torch_optimizer(optimizer):
    """``optimizer`` itself where it is a torch optimizer, else the torch optimizer in its attribute ``optimizer``.

    Raises:
        TypeError: neither is one.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"wanted a torch.optim.Optimizer; found {type(optimizer).__name__}")
