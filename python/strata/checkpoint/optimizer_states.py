"""What an optimizer keeps, as a checkpoint has it: param groups, and of an optimizer of the user's its states.

States of as many elements as the parameter has are the core's to write and read; those of one element are within the
JSON, as tensors of their dtype where they are tensors.
"""

import json

import torch

from .. import _C
from .plain_values import to_plain


def optimizer_state(engine, tensors):
    """Param groups, and of an optimizer of the user's what is not kept element by element."""
    optimizer = engine.optimizer
    if optimizer is None:
        return None
    groups = [
        {k: to_plain(v, tensors, f"optimizer.param_groups[{i}].{k}") for k, v in group.items() if k != "params"}
        for i, group in enumerate(optimizer.param_groups)
    ]
    state = {"class": type(optimizer.inner or optimizer).__name__, "param_groups": groups, "members": _members(engine)}
    if optimizer.inner is not None:
        mine = {}
        for index, segment, values in _segments(engine):
            name = engine.core.known_name(index)
            scalars = {k: v for k, v in values.items() if not _by_element(v, segment)}
            mine[name] = {k: to_plain(_scalar(v, name, k), None, f"{name}.{k}") for k, v in scalars.items()}
        state["scalars"] = mine  # of this rank's parameters: their tensors are within the JSON
        state["scalars_as_they_are"] = True  # importers have numbers of what was a tensor
    return state


def _members(engine):
    """[[names]] of each param group's parameters, in its order: exports to flat formats need it."""
    known_by = {id(known.parameter): known for known in engine.known}
    return [
        [engine.core.known_name(part.index) for p in group["params"] if id(p) in known_by
         for part in known_by[id(p)].parts]
        for group in engine.optimizer.param_groups
    ]  # fmt: skip


def _scalar(value, name, key):
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise _C.UsageError(f"the optimizer's state '{key}' of '{name}' has {value.numel()} elements; kept are states "
                            "of one element, and of as many as the parameter has")
    return value


def _place_of(key, group, segment):
    """Where torch's optimizers keep a tensor of one element, as their load_state_dict has it."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return segment.device if on_device else "cpu"


def _by_element(value, segment):
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == segment.numel()


def of_all_ranks(engine, mine):
    """Scalars of every parameter; a rank knows those of which it owns a part."""
    merged = {}
    for text in reversed(engine._collectives.all_gather_text(json.dumps(mine))):
        merged.update(json.loads(text))
    return merged


def _segments(engine):
    """[(parameter, segment, what the inner optimizer keeps of it)]."""
    inner = engine.optimizer.inner
    segments = [segment for group in inner.param_groups for segment in group["params"]]
    by_pointer = {segment.data_ptr(): segment for segment in segments if segment.numel()}
    result = []
    for _, param, weight in engine.core.segments():
        if weight.numel():
            segment = by_pointer[weight.data_ptr()]
            result.append((param, segment, inner.state.get(segment, {})))
    return result


def states_of_segments(engine):
    if engine.optimizer is None or engine.optimizer.inner is None:
        return []
    return [
        (param, key, value.detach().contiguous())
        for param, segment, values in _segments(engine) for key, value in values.items() if _by_element(value, segment)
    ]  # fmt: skip


def targets_of_segments(engine, checkpoint):
    """([(parameter, kind, tensor to fill)], [(segment, key, the same tensor)])."""
    targets, tensors = [], []
    if engine.optimizer.inner is None:
        return targets, tensors
    for param, segment, _ in _segments(engine):
        name = engine.core.known_name(param)
        for kind in checkpoint.kinds[1:]:
            dtype = checkpoint.dtype_of(name, kind)
            if dtype is not None:
                tensors.append((segment, kind, torch.zeros(segment.shape, dtype=dtype, device=segment.device)))
                targets.append((param, kind, tensors[-1][2]))
    return targets, tensors


def load_optimizer(engine, saved, tensors):
    optimizer = engine.optimizer
    if saved is None:
        return
    groups = saved["param_groups"]
    for group, values in zip(optimizer.param_groups, groups):
        group.update(values)
    if optimizer.inner is None:
        return
    if optimizer.inner.param_groups is not optimizer.param_groups:
        for group, values in zip(optimizer.inner.param_groups, groups):
            group.update(values)
    group_of = {id(segment): group for group in optimizer.inner.param_groups for segment in group["params"]}
    by_segment = {}
    for segment, key, tensor in tensors:
        by_segment.setdefault(id(segment), {})[key] = tensor
    scalars = saved.get("scalars", {})
    for param, segment, present in _segments(engine):
        values = dict(scalars.get(engine.core.known_name(param), {}))
        for key, value in values.items():
            if key == "step" and not isinstance(value, torch.Tensor) and not saved.get("scalars_as_they_are"):
                value = torch.tensor(float(value))  # torch's optimizers count steps in tensors
            if isinstance(value, torch.Tensor):
                value = value.to(_place_of(key, group_of[id(segment)], segment)).clone()
            values[key] = value
        values.update(by_segment.get(id(segment), {}))
        if values:
            optimizer.inner.state[segment] = values


def require_same_groups(engine, saved):
    if saved is None or len(saved["param_groups"]) == len(engine.optimizer.param_groups):
        return
    raise _C.UsageError(f"the optimizer has {len(engine.optimizer.param_groups)} param groups, the checkpoint's had "
                        f"{len(saved['param_groups'])}; make them alike, or ask for load_optimizer_states=False")
