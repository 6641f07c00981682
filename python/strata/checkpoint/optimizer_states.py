"""The optimizer's part of a checkpoint: param groups, and the states of an optimizer of the user's.

The core writes and reads states that have as many elements as the parameter. States of one element are within the
JSON; those that are tensors keep their dtype.
"""

import json

import torch

from .. import _C
from ..ops.param_groups import set_values
from .plain_values import to_plain


def optimizer_state(engine, tensors):
    """Param groups, and the states of the user's optimizer that do not have one entry for each element."""
    optimizer = engine.optimizer
    if optimizer is None:
        return None
    groups = [
        {k: to_plain(v, tensors, f"optimizer.param_groups[{i}].{k}") for k, v in group.items() if k != "params"}
        for i, group in enumerate(optimizer.param_groups)
    ]
    state = {"class": type(optimizer.inner or optimizer).__name__, "param_groups": groups, "members": _members(engine)}
    if optimizer.inner is not None:
        mine, states = {}, engine.core.segment_states
        for index, _, values in states.entries():
            name = engine.core.known_name(index)
            scalars = {k: v for k, v in values.items() if not states.is_by_element(index, v)}
            if optimizer.takes_whole:  # every rank has the same ones, whatever their shape
                mine[name] = {k: to_plain(v, _large(v, tensors), f"optimizer.{name}.{k}") for k, v in scalars.items()}
            else:
                mine[name] = {k: to_plain(_scalar(v, name, k), None, f"{name}.{k}") for k, v in scalars.items()}
        state["scalars"] = mine  # of this rank's parameters: their tensors are within the JSON
        state["scalars_as_they_are"] = True  # importers write numbers where the optimizer had tensors
    return state


def _members(engine):
    """[[names]] of each param group's parameters, in its order: exports to flat formats need it."""
    known_by = {id(known.parameter): known for known in engine.known}
    return [
        [engine.core.known_name(part.index) for p in group if id(p) in known_by for part in known_by[id(p)].parts]
        for group in engine.optimizer.members
    ]  # fmt: skip


def _large(value, tensors):
    return None if isinstance(value, torch.Tensor) and value.numel() == 1 else tensors


def _scalar(value, name, key):
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise _C.UsageError(f"the optimizer's state '{key}' of '{name}' has {value.numel()} elements; kept are states "
                            "of one element, and of as many as the parameter has")
    return value


def place_of(key, group, parameter):
    """The device on which torch's optimizers keep a state of one element, by the rule of their load_state_dict."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else "cpu"


def of_all_ranks(engine, mine):
    """Scalars of every parameter; a rank knows those of which it owns a part."""
    merged = {}
    for text in reversed(engine._collectives.all_gather_text(json.dumps(mine))):
        merged.update(json.loads(text))
    return merged


def states_of_segments(engine):
    """[(parameter, kind, this rank's part of it)]: the states of the user's optimizer with one entry an element."""
    if engine.optimizer is None or engine.optimizer.inner is None:
        return []
    states = engine.core.segment_states
    found = []
    for index, _, values in states.entries():
        kept = {key: states.own(index, value) for key, value in values.items() if states.is_by_element(index, value)}
        found += [(index, key, part.contiguous()) for key, part in kept.items() if part.numel()]
    return found


def targets_of_segments(engine, checkpoint):
    """([(parameter, kind, tensor to fill)], [(parameter, kind, the same tensor; None: this rank owns nothing)])."""
    targets, tensors = [], []
    if engine.optimizer.inner is None:
        return targets, tensors
    for index, parameter, _ in engine.core.segment_states.entries():
        name = engine.core.known_name(index)
        for kind in checkpoint.kinds[1:]:
            dtype = checkpoint.dtype_of(name, kind)
            if dtype is None:
                continue
            first, last = _C.state_range(engine.core, index)
            tensors.append((index, kind, torch.zeros(last - first, dtype=dtype, device=parameter.device)))
            if first < last:
                targets.append(tensors[-1])
    return targets, tensors


def load_optimizer(engine, saved, tensors):
    optimizer = engine.optimizer
    if saved is None:
        return
    groups = saved["param_groups"]
    for group, values in zip(optimizer.param_groups, groups):
        set_values(group, values)
    if optimizer.inner is None:
        return
    if optimizer.inner.param_groups is not optimizer.param_groups:
        for group, values in zip(optimizer.inner.param_groups, groups):
            set_values(group, values)
    states = engine.core.segment_states
    group_of = {id(p): group for group in optimizer.inner.param_groups for p in group["params"]}
    by_element = {}
    for index, key, part in tensors:
        by_element.setdefault(index, {})[key] = states.from_own(index, part if part.numel() else None)
    scalars = saved.get("scalars", {})
    for index, parameter, _ in states.entries():
        values = dict(scalars.get(engine.core.known_name(index), {}))
        for key, value in values.items():
            if key == "step" and not isinstance(value, torch.Tensor) and not saved.get("scalars_as_they_are"):
                value = torch.tensor(float(value))  # torch's optimizers count steps in tensors
            if isinstance(value, torch.Tensor):
                value = value.to(place_of(key, group_of[id(parameter)], parameter)).clone()
            values[key] = value
        values.update({key: value for key, value in by_element.get(index, {}).items() if value is not None})
        if values:
            states.put(index, values)


def require_same_groups(engine, saved):
    if saved is None or len(saved["param_groups"]) == len(engine.optimizer.param_groups):
        return
    raise _C.UsageError(f"the optimizer has {len(engine.optimizer.param_groups)} param groups, the checkpoint's had "
                        f"{len(saved['param_groups'])}; make them alike, or ask for load_optimizer_states=False")
