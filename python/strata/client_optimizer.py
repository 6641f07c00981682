"""Runs an optimizer of the user's on the engine's fp32 masters: the parts that the engine lends it, and its states.
States on a drive come to the host for the update of their unit, and go back after it."""

import inspect
import weakref
from contextlib import contextmanager

import torch

from . import _C
from .model.parameter import flattened, shaped
from .model.tiles import known_as
from .optimizer_probe import (
    needs_closure, updates_by_another, why_not_by_element, why_not_by_parameter, why_not_in_calls,
)


def choose_parts(sharded, config, world_size, device):
    """Decides whether ``sharded.inner`` updates parts of parameters or whole ones; ``device``: of the model. Returns
    the engine's rule: "external", "whole", or "together" where one rank has to have all. UsageError where it can do
    none of these, or not in the tier that ``config``, a _C.Config, gives to the states."""
    name, stage = type(sharded.inner).__name__, config.stage
    if inspect.unwrap(type(sharded.inner).step) is inspect.unwrap(torch.optim.Optimizer.step):
        raise _C.UsageError(f"{name} has no step(): it updates parameters within backward(), where the engine has no "
                            "reduced gradients yet; take an optimizer that updates in step(), such as AdamW or "
                            "Adafactor")
    if needs_closure(sharded.inner):
        raise _C.UsageError(f"{name} computes the loss itself, several times in a step, and the engine's gradients are "
                            "of the passes that the script makes; take an optimizer whose step() needs no closure, "
                            "such as AdamW")
    held = updates_by_another(sharded.inner)
    if held is not None:
        raise _C.UsageError(f"the engine puts its parameters into the param groups of the optimizer that it gets, and "
                            f"{name} updates by another one, which has groups of its own and would train nothing. Make "
                            f"it show them (self.param_groups = self.{held}.param_groups), or pass one optimizer with "
                            f"a param group for each kind of parameter; found {held}")
    places = [device if tier == "device" else torch.device("cpu") for tier in sorted(config.states_tiers)]
    reason = next(filter(None, (why_not_by_element(sharded.inner, place) for place in places)), None)
    if "nvme" in config.states_tiers:
        why_not = reason or why_not_in_calls(sharded.inner)
        if why_not is not None:
            raise _C.UsageError(
                f"{name} cannot have its states on a drive ({why_not}): there the engine calls step() once for each "
                "unit, on parts of its parameters. Write zero_optimization.offload_optimizer.device \"cpu\" or "
                "\"none\", or take an elementwise optimizer, such as AdamW, Lion or SGD; found \"nvme\"")
    if reason is None:
        return "external"
    if places != [device] and why_not_by_element(sharded.inner, device) is None:
        raise _C.UsageError(f"{name} does not update on the host ({reason}), where offload_optimizer has it update "
                            "what rests there. Write zero_optimization.offload_optimizer.device \"none\", or take an "
                            f"optimizer that works on the CPU, such as AdamW; found {sorted(config.states_tiers)}")
    sharded.takes_whole = True
    apart = None if world_size == 1 else next(
        filter(None, (why_not_by_parameter(sharded.inner, place) for place in places)), None)
    if apart is None:
        return "whole"
    if stage != 0:
        raise _C.UsageError(f"{name} does not update each parameter by itself ({apart}). At stages 1 to 3 no rank has "
                            "all parameters. Write zero_optimization.stage 0, where one rank updates all of them, or "
                            "take an optimizer that updates each by itself, such as AdamW, Lion or Adafactor; found "
                            f"stage {stage} on {world_size} ranks")
    return "together"


def members_of(sharded, engine):
    """[[(index in the engine, shape)]], by param group: the parameters that are trained and have elements."""
    known = {id(known.parameter): known for known in engine.known}
    members = []
    for group in sharded.members:
        trained = [p for p in group if p.requires_grad or id(p) in sharded.taken_up]
        found = [known[id(p)] for p in trained if id(p) in known]
        if sharded.takes_whole and any(len(parameter.parts) > 1 for parameter in found):
            raise _C.UsageError(f"{type(sharded.inner).__name__} needs whole parameters, and some are used in tiles; "
                                "set strata.tiles.max_gather to the size of the largest, or take an optimizer that "
                                "updates element by element, such as AdamW")
        found = [parameter for parameter in found if 0 not in parameter.shape]
        members.append([(part.index, parameter.shape) for parameter in found for part in parameter.parts])
    return members


def run_on_shards(sharded, engine):
    """Lets ``sharded.inner`` update this rank's fp32 masters, which become the parameters of its groups."""
    parts = DriveStates if "nvme" in engine._config.states_tiers else SegmentStates
    states = WholeStates if sharded.takes_whole else parts
    members = members_of(sharded, engine)
    engine.core.segment_states = states(sharded.inner, engine.core, members, engine.world_size)
    lend_parts(engine.core.segment_states, engine)


class SegmentStates:
    """The optimizer over this rank's parts of the parameters, each a Parameter of one dimension to it. ``inner`` is the
    user's optimizer, whose param groups get the parts; ``members`` is of ``members_of``; ``world`` is the number of
    ranks. ``core``, a _C.ShardedModel, keeps this object, which does not keep it."""

    def __init__(self, inner, core, members, world):
        self._inner, self._step, self._core = inner, inner.step, weakref.ref(core)
        self._alone = world == 1
        self._away = []  # (the optimizer's dict, name, device) of states that offload_states() has moved
        self._parameters, self._has_states = {}, bool(inner.state)  # Adagrad's, say, exist from the start
        inner.state.clear()
        self.take_up(core, members)
        core.set_update(self._update)
        core.set_outside_states(self._park, self._unpark)

    def take_up(self, core, members):
        """Lends the optimizer the parameters that ``core`` trains by now; those that it already has stay the same
        objects. ``members``: as of the constructor."""
        self._members = members
        trained = {index for group in members for index, _ in group} | {index for _, index, _ in core.segments()}
        self._ranges = {index: _C.state_range(core, index) for index in trained}
        self._lend(core)
        if self._has_states:
            has = self._inner.state
            groups = self._inner.param_groups
            for batch in self._batches():
                lacking = {id(p) for p in batch if p not in has}
                new = [{**group, "params": [p for p in group["params"] if id(p) in lacking]} for group in groups]
                has.update(type(self._inner)(new, **self._inner.defaults).state)

    def _batches(self):
        """The parameters, by those whose states may exist in memory at once."""
        yield list(self._parameters.values())

    def _lend(self, core):
        for group in self._inner.param_groups:
            group["params"] = []
        before, self._parameters = self._parameters, {}  # in the order of the core's segments
        for group, index, weight in core.segments():
            part = before.get(index)
            part = torch.nn.Parameter(self._form(core, index, weight)) if part is None else part
            self._parameters[index] = part
            if group >= 0:  # else it is frozen, beside one that is not
                self._inner.param_groups[group]["params"].append(part)

    def _form(self, core, index, values):
        """The optimizer's view of ``values``, which the core lends of a parameter: its masters, or its gradient."""
        return values

    def _update(self, gradients):
        """Called in the engine's step. ``gradients``: by segment, valid during the call; None where no rank has one."""
        core = self._core()
        for (index, part), gradient in zip(self._parameters.items(), gradients, strict=True):
            part.grad = None if gradient is None else self._form(core, index, gradient)
        try:
            with plain_parts(self._parameters.values()):
                self._step()
        finally:
            for part in self._parameters.values():
                part.grad = None  # the engine uses the memory again

    def edit(self, change):
        """Calls ``change``, which may write to the optimizer's parameters; masters and weights follow. Collective."""
        with plain_parts(self._parameters.values()), torch.no_grad():
            _C.edit_masters(self._core(), change)

    def entries(self):
        """[(index in the engine, the Parameter that the optimizer knows, the dict of its states)]."""
        return [(i, p, self._inner.state.get(p, {})) for i, p in self._parameters.items() if p.numel()]

    def put(self, index, values):
        """Makes the dict ``values`` the optimizer's states of a parameter; an empty one removes them."""
        parameter = self._parameters.get(index)
        if parameter is None:
            return
        self._inner.state.pop(parameter, None)
        if values:
            self._inner.state[parameter] = values

    def is_by_element(self, index, value):
        """Whether the state ``value`` has an entry for each element of the part that the optimizer was lent."""
        parameter = self._parameters[index]
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape

    def range(self, index):
        """(first element, last) of the parameter: those of which this rank keeps the states."""
        return self._ranges.get(index) or _C.state_range(self._core(), index)

    def joined(self, index, part):
        """The whole of a state, flat, where each rank passes its ``part``; None where there is none. Collective."""
        return _C.join_state(self._core(), index, part)

    def own(self, index, value):
        """This rank's part of a state that has one entry an element: a view of one dimension."""
        first, last = self._ranges[index]
        return value.detach()[: last - first]  # what follows is padding

    def from_own(self, index, part):
        """The state, in the optimizer's form, of which ``part`` is this rank's part; None: the optimizer has no state
        of the parameter. ``part`` is None where this rank owns no element of it."""
        parameter = self._parameters.get(index)
        if parameter is None or part is None:
            return None
        state = torch.zeros(parameter.shape, dtype=part.dtype, device=parameter.device)
        self.own(index, state).copy_(part.reshape(-1))
        return state

    def part(self, index, name):
        """This rank's part of a state, of one dimension; None where there is none."""
        value = self._state(index, name)
        return None if value is None else self.own(index, value)

    def _state(self, index, name):
        parameter = self._parameters.get(index)
        value = None if parameter is None else self._inner.state.get(parameter, {}).get(name)
        return value if isinstance(value, torch.Tensor) and value.shape == parameter.shape else None

    def set_part(self, index, name, values):
        """Gives this rank's part of a state that there is new values."""
        self.own(index, self._state(index, name)).copy_(values)

    def has(self, name):
        """Whether any part has a state of this name."""
        return any(self._state(index, name) is not None for index in self._parameters)

    def _park(self, moments, masters, pin_memory):
        """Called while the engine offloads states. With ``moments`` it moves the optimizer's tensors to the host. It
        releases the masters, whose memory the engine moves; the parts are empty then."""
        if moments:
            for kept in self._inner.state.values():
                for name, value in kept.items():
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        copy = _copy_at("cpu", value, pin_memory=pin_memory)
                        self._away.append((kept, name, value.device))
                        kept[name] = copy
        if masters:
            self._let_go()

    def _let_go(self):
        for part in self._parameters.values():
            part.data = part.data.new_empty(0)

    def _unpark(self):
        """May be called again after an error: a state that is back is no longer in the list."""
        while self._away:
            kept, name, device = self._away[-1]
            kept[name] = _copy_at(device, kept[name])
            self._away.pop()

    def take_back(self, core):
        """Lends the optimizer the masters again, after the engine has reloaded its states."""
        for part, (_, index, weight) in zip(self._parameters.values(), core.segments(), strict=True):
            part.data = self._form(core, index, weight)


class WholeStates(SegmentStates):
    """The optimizer over the whole parameters that this rank owns, for classes whose update of an element needs other
    elements. A parameter has its own shape; the engine brings its values and its gradient, and takes the new values to
    all ranks. Its states are the owner's, and lie nowhere else."""

    def _form(self, core, index, values):
        return shaped(core, index, values[: torch.Size(core.full_shape(index)).numel()])  # what follows is padding

    def _update(self, gradients):
        core = self._core()
        gpus = [core.device] if core.device.type == "cuda" else []
        with torch.random.fork_rng(gpus, enabled=not self._alone):  # the script's random numbers do not change
            if not self._alone:
                torch.manual_seed(core.global_steps)
            super()._update(gradients)

    def range(self, index):
        return 0, self._parameters[index].numel() if index in self._parameters else 0

    def joined(self, index, part):
        return _C.share_state(self._core(), index, part if part is not None and part.numel() else None)

    def own(self, index, value):
        return flattened(self._core(), index, value.detach())

    def set_part(self, index, name, values):
        self._state(index, name).copy_(shaped(self._core(), index, values))

    def from_own(self, index, part):
        return None if part is None or index not in self._parameters else shaped(self._core(), index, part.clone())


_BLOCK = "_strata_block"  # attribute of what stands for a state that is on the drive


class DriveStates(SegmentStates):
    """The optimizer over this rank's parts, some of which the engine lends during their unit's update only.

    Each step calls the optimizer once for all parts that rest elsewhere, and once for each unit on the drive. Between
    the calls a state with one entry an element is on the drive, and a tensor without memory of its own stands for it.
    Those who read such a state get a copy."""

    def _lend(self, core):
        super()._lend(core)
        self._units = dict(core.parts_on_drive())
        for _, index, weight in core.segments():
            if index in self._units:
                self._parameters[index].data = weight  # a larger unit has got a larger buffer for all
        self.__dict__.setdefault("_blocks", {})  # {(index, name): (block, dtype)}

    def _batches(self):
        by_unit = {}
        for index, parameter in self._parameters.items():
            by_unit.setdefault(self._units.get(index), []).append((index, parameter))
        for members in by_unit.values():
            yield [parameter for _, parameter in members]
            self._put_away([index for index, _ in members])

    def _update(self, gradients):
        lent = zip(self._parameters, gradients, strict=True)
        at_work = [index for index, gradient in lent if gradient is not None and index in self._units]
        self._bring(at_work)
        try:
            super()._update(gradients)
        finally:
            self._put_away(at_work)

    def _bring(self, indices):
        for index in indices:
            kept = self._inner.state.get(self._parameters[index], {})
            for name, value in kept.items():
                if hasattr(value, _BLOCK):
                    kept[name] = self._read(value)

    def _put_away(self, indices):
        core = self._core()
        for index in indices:
            kept = self._inner.state.get(self._parameters[index], {}) if index in self._units else {}
            for name, value in kept.items():
                if not self.is_by_element(index, value) or hasattr(value, _BLOCK):
                    continue
                flat = value.detach().to("cpu").contiguous()
                block, dtype = self._blocks.get((index, name), (None, None))
                if dtype != flat.dtype:
                    block = core.shelf_add(f"{core.parameter_name(index)}.{name}", flat.nbytes)
                    self._blocks[index, name] = block, flat.dtype
                core.shelf_put(block, flat)
                kept[name] = torch.zeros(1, dtype=flat.dtype).expand(flat.numel())
                setattr(kept[name], _BLOCK, block)

    def _read(self, value):
        there = torch.empty(value.numel(), dtype=value.dtype)
        self._core().shelf_bring(getattr(value, _BLOCK), there)
        return there

    def put(self, index, values):
        super().put(index, values)
        if index in self._parameters:
            self._put_away([index])

    def own(self, index, value):
        return super().own(index, self._read(value) if hasattr(value, _BLOCK) else value)

    def set_part(self, index, name, values):
        self._bring([index] if index in self._units else [])
        try:
            super().set_part(index, name, values)
        finally:
            self._put_away([index])


def _copy_at(device, value, **more):
    """A tensor of the same values on ``device``; MemoryError where there is no room."""
    try:
        return torch.empty_like(value, device=device, **more).copy_(value)
    except RuntimeError as error:  # torch raises this for devices and for pinned memory
        raise MemoryError(f"no room for a state of the optimizer on {device}: {error}") from error


_gradient = torch.Tensor.grad


class LentPart(torch.nn.Parameter):
    """A part of a parameter of the model, outside ``step()``: its ``grad`` is an error while the engine has collected
    one, and None otherwise. A pickle of one is a plain ``torch.nn.Parameter``."""

    _of = None  # weak: the model's parameter

    @property
    def grad(self):
        gradient = _gradient.__get__(self)
        if gradient is None:
            self._require_nothing_collected()
        return gradient

    @grad.setter
    def grad(self, gradient):
        self._require_nothing_collected()
        _gradient.__set__(self, gradient)

    @grad.deleter
    def grad(self):
        self.grad = None

    def __reduce_ex__(self, protocol):
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    def _require_nothing_collected(self):
        parameter = None if self._of is None else self._of()
        if parameter is not None and parameter.grad is not None:
            raise _C.UsageError(
                "the param groups of this optimizer have fp32 parts of the parameters that this rank owns, whose .grad "
                "is there in step() alone; read, clip or drop the gradients of the model's own parameters "
                "(engine.module.parameters()), call engine.zero_grad(), or set gradient_clipping in the configuration")


def lend_parts(states, engine):
    """Marks the parts that ``states``, a ``SegmentStates``, lends to the optimizer, each with the model's parameter."""
    for index, part in states._parameters.items():
        part.__class__ = LentPart
        part._of = weakref.ref(known_as(engine._described[index][1]))


@contextmanager
def plain_parts(parts):
    """Context in which the parts are plain ``torch.nn.Parameter``s: torch's optimizers choose kernels by that class."""
    parts = [part for part in parts if type(part) is LentPart]
    for part in parts:
        part.__class__ = torch.nn.Parameter
    try:
        yield
    finally:
        for part in parts:
            part.__class__ = LentPart
