"""Tells which of the engine's own update rules compute what a user's optimizer computes."""

import inspect
import sys

import torch

from .ops.adam import adam_mode
from .ops.elementwise import ElementwiseOptimizer


def native_rule(optimizer):
    """(rule, {id(parameter): another rule}) by which the engine updates in place of ``optimizer``, a torch.optim
    optimizer; None: there is no such rule. The rules are AdamW and Adam of torch without amsgrad or maximize, and the
    optimizers of ``strata.ops.adam`` and ``strata.ops.lion``."""
    if adam_mode(optimizer) is not None:
        return adam_mode(optimizer), {}
    if _is_lion(optimizer):
        return "lion", {}
    kind = getattr(type(optimizer), "_strata_likeness", type(optimizer))
    exact = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}.get(kind)
    groups = optimizer.param_groups
    if exact is None or any(g.get("amsgrad") or g.get("maximize") or g.get("capturable") for g in groups):
        return None
    rules = ["adamw" if g.get("decoupled_weight_decay", exact == "adamw") else "adam" for g in groups]
    return rules[0], {id(p): rule for group, rule in zip(groups, rules) for p in group["params"] if rule != rules[0]}


def _is_lion(optimizer):
    """Whether it is one of ``strata.ops.lion``, without an update of its own."""
    lion = sys.modules.get(f"{__package__}.ops.lion")
    if lion is None or not isinstance(optimizer, lion.FusedLion.__base__):
        return False
    kind, base = type(optimizer), lion.FusedLion.__base__
    same_step = inspect.unwrap(kind.step) is inspect.unwrap(ElementwiseOptimizer.step)  # torch wraps it to profile it
    return same_step and kind.update is base.update and kind.compute is base.compute
