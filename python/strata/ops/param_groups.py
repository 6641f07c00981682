"""Writes settings of an optimizer's param groups, for schedules and checkpoints."""

import torch


def set_value(group, key, value):
    """Sets a value of a param group. A tensor is filled in place, as torch's schedulers do, since compiled and captured
    steps hold it."""
    if isinstance(group.get(key), torch.Tensor) and group[key] is not value:
        group[key].copy_(value) if isinstance(value, torch.Tensor) else group[key].fill_(value)
    else:
        group[key] = value


def set_values(group, values):
    """``set_value`` of each of ``values``, a dict, but for "params"."""
    for key, value in values.items():
        if key != "params":
            set_value(group, key, value)
