"""Functions that read and change the states of a parameter: its fp32 master weight, the reduced gradient of the step
so far, and the optimizer's state.

The "full" functions have a whole tensor of the parameter's shape, fp32, on the model's device. The "local" functions
have this rank's part of it: the elements that this rank owns, of one dimension, empty on ranks that own none, in the
order of the parameter's memory (channels innermost in torch's channels_last). Reading
a whole tensor and setting master weights are collective: every rank makes the same calls in the same order. A setter
takes this rank's part of the value. Every getter returns None where no rank has such a state: for a frozen parameter,
for a parameter that no engine owns, for a gradient before the first reduction of a step or after the step, for a state
before the first step. For a parameter that is used in tiles the whole tensor is on the host, and a rank's part joins
its elements of each tile. These functions wait for the device; call them between ``engine.backward()`` and
``engine.step()``, or between steps."""

import functools

import torch

from . import _C
from .model.parameter import flattened, full_shape, owner_of, shaped
from .model.tiles import tiles_of


def safe_update_full_grad_vectorized(param_list, update_func):
    """Sets the gradient of every trainable one of ``param_list`` to ``update_func(gradient, param)``. Collective."""
    for param in param_list:
        gradient = _read(param, "gradient", whole=True) if param.requires_grad else None
        if gradient is not None:
            _write(param, update_func(gradient, param), "gradient", whole=True)


_OURS = ("master", "gradient")


def _read(param, optim_state_key, whole):
    name, tiles = optim_state_key, tiles_of(param)
    if tiles is not None:
        values = torch.empty(tiles.shape) if whole else []
        for tile in tiles:
            part = _read(tile.parameter, name, whole)
            if part is None:  # so no parameter has one, on any rank
                return None
            if whole:
                values[tile.begin : tile.end] = part
            else:
                values.append(part)
        return values if whole else torch.cat(values)
    core, index = owner_of(param)
    if core is None:
        return None
    outside = _kept_outside(core, name)
    if outside is not None:
        _wait_for(core)
        first, last = outside.range(index)
        values = outside.part(index, name)
        if values is not None:
            values = values.to(core.device, torch.float32, copy=True)
        elif first == last and outside.has(name):  # this rank owns no element of it
            values = torch.empty(0, device=core.device)
        values = outside.joined(index, values) if whole else values
    else:
        values = _C.read_state(core, index, name, whole)
    return shaped(core, index, values) if values is not None and whole else values


def _write(param, value, optim_state_key, whole):
    name, tiles = optim_state_key, tiles_of(param)
    core, index = owner_of(param)
    if core is None and tiles is None:
        raise _C.UsageError("only states of a model under the engine can be set; found a parameter that no engine owns")
    shape = torch.Size(full_shape(param))
    if whole and value.shape != shape:
        raise _C.UsageError(f"wanted a value of the parameter's shape {list(shape)}; found {list(value.shape)}")
    if tiles is not None:
        sizes = [last - first for first, last in (_C.state_range(tile.core, tile.index) for tile in tiles)]
        _require_part(tiles.name, value, sum(sizes), whole)
        parts = [value[tile.begin : tile.end] for tile in tiles] if whole else value.split(sizes)
        for tile, part in zip(tiles, parts):
            _write(tile.parameter, part, name, whole)
        return
    outside = _kept_outside(core, name)
    value = value.detach().to(device=core.device, dtype=torch.float32)
    flat = (flattened(core, index, value) if whole else value).contiguous().view(-1)
    if outside is None:
        is_set = _C.write_state(core, index, name, whole, flat)
    else:
        first, last = outside.range(index)
        _require_part(core.parameter_name(index), flat, last - first, whole)
        _wait_for(core)
        is_set = outside.part(index, name) is not None or first == last
        if first != last and is_set:
            with torch.no_grad():
                outside.set_part(index, name, flat[first:last] if whole else flat)
    if not is_set:
        raise _C.UsageError(f"there is no {name} to set: the parameter is frozen, or it is too early (gradients exist "
                            "from backward to step, states from the first step on)")


def _require_part(name, value, numel, whole):
    if not whole and value.numel() != numel:
        raise _C.UsageError(f"this rank's part of '{name}' has {numel} elements; found {value.numel()}")


def _kept_outside(core, name):
    """The ``SegmentStates`` that have ``name``; None where the engine itself has it."""
    outside = getattr(core, "segment_states", None)  # there where the user's optimizer updates the shards
    if outside is not None and name not in _OURS:
        return outside
    names = _C.state_names(core)
    if names and name not in (*_OURS, *names):
        raise _C.UsageError(f"the optimizer state '{name}' cannot be read here; found are {', '.join(names)}")
    return None


def _wait_for(core):
    core.require_no_state_away("reading or setting a state of a parameter")
    core.finish_step()
    if core.device.type == "cuda":
        torch.cuda.synchronize(core.device)


# By the end of a name: the state, None where the argument ``optim_state_key`` names it, and the docstring.
_KINDS = {
    "fp32_param": ("master", "The master weight of ``param``; or None. Collective, if whole. A setter sets the weight, "
                   "too, and is collective."),
    "grad": ("gradient", "The gradient of ``param`` reduced over the ranks so far in this step; or None. Under fp16 it "
             "is multiplied by the loss scale. ``engine.step()`` will clip and use it. A read of a whole one is "
             "collective."),
    "optimizer_state": (None, 'The state ``optim_state_key`` of ``param`` ("exp_avg", "exp_avg_sq"; other optimizers '
                        'have others for each element, such as "momentum_buffer"); or None. A read of a whole one is '
                        "collective.")}

for _kind, (_state, _doc) in _KINDS.items():
    _named = {} if _state is None else {"optim_state_key": _state}
    for _scope in ("full", "local"):
        for _verb, _function in (("get", _read), ("set", _write)):
            _made = functools.partial(_function, **_named, whole=_scope == "full")
            _made.__doc__ = _doc
            globals()[f"safe_{_verb}_{_scope}_{_kind}"] = _made

__all__ = [name for name in globals() if name.startswith("safe_")]
