"""Settings of an optimizer's param groups, as schedules and checkpoints write them."""

import torch


def set_value(group, key, value):
    """Gives a param group's setting a value; one that is a tensor is filled, as torch's schedulers do, since compiled
    and captured steps hold it."""
    if isinstance(group.get(key), torch.Tensor) and group[key] is not value:
        group[key].copy_(value) if isinstance(value, torch.Tensor) else group[key].fill_(value)
    else:
        group[key] = value


def set_values(group, values):
    """``set_value`` of each of ``values``, a dict, but for "params"."""
    for key, value in values.items():
        if key != "params":
            set_value(group, key, value)
