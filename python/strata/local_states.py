"""The optimizer's state of one rank in torch's form, as ``optimizer.state_dict()`` and ``load_state_dict()`` have it.

A part holds the elements of a parameter that this rank owns, in one dimension; where these are all elements, it has the
parameter's shape. Parameters are numbered as torch numbers them, group by group. Beside torch's two keys there is
"strata": the ranges of the parts, the number of steps, and, where weights are in 16 bits, the fp32 masters."""

import collections
import copy
import math
import types

import torch

from . import _C
from .checkpoint.library_states import BLOCK8, Numbers, engine_states, map8
from .checkpoint.training import log_conversion
from .model.parameter import flattened, shaped
from .ops.elementwise import place_of, set_values
from .rank_logging import logger

_OF_ALL_ELEMENTS = ("step", "eta", "mu", "mu_product")  # states of torch's optimizers that a parameter has once


class _Member:
    """A parameter of the optimizer, with the engine's parameters for it: one, or one for each tile."""

    def __init__(self, core, known):
        self.core, self.indices, self.shape = core, [part.index for part in known.parts], list(known.shape)
        self.name = core.known_name(self.indices[0])
        self.names = _C.state_names(core, self.indices[0])  # of the states that the engine keeps
        self.dtype = known.parameter.dtype
        # [(first element of the whole, last)] of each part of this rank
        self.ranges = [tuple(part.first + at for at in _C.state_range(core, part.index)) for part in known.parts]
        self.numel = math.prod(self.shape)
        self.sizes = [last - first for first, last in self.ranges]

    def shaped(self, parts):
        """Parts of this rank as one tensor."""
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if joined.numel() != self.numel:
            return joined
        return shaped(self.core, self.indices[0], joined) if len(parts) == 1 else joined.view(self.shape)

    def parts_of(self, name, value, place, by_element):
        """This rank's elements of the state ``name``, one tensor for each parameter of the engine; None: ``value`` has
        not one entry for each element. UsageError for a part with other ranges than this rank's. ``value`` is the whole
        state, or a result of ``shaped`` on a rank that had the ranges ``place``; None: only whole states are accepted.
        ``by_element``: names of the states with one entry an element; None: the shape tells."""
        value = value.read() if isinstance(value, Numbers) else value
        if not isinstance(value, torch.Tensor):
            return None
        if name in _OF_ALL_ELEMENTS if by_element is None else name not in by_element:
            return None
        if list(value.shape) == self.shape and value.numel() == self.numel:
            flat = flattened(self.core, self.indices[0], value.detach())
            return [flat[first:last] for first, last in self.ranges]
        flat = value.detach().reshape(-1)
        if place is None or value.dim() != 1 or flat.numel() != sum(last - first for first, last in place):
            return None
        if [list(r) for r in place] != [list(r) for r in self.ranges]:
            raise _C.UsageError(
                f"load_state_dict: this state is another rank's part, or of another number of ranks or stage: of "
                f"'{self.name}' this rank has elements {self.ranges}; found {place}. Save with engine.save_checkpoint "
                "and load with engine.load_checkpoint, which go from any number of ranks to any other")
        return list(flat.split(self.sizes))


def _members(optimizer, engine):
    """[[``_Member``, or None for a parameter that the engine does not train]], by param group."""
    known = {id(known.parameter): known for known in engine.known}
    return [[_Member(engine.core, known[id(p)]) if id(p) in known and p.requires_grad else None for p in group]
            for group in optimizer.members]


def state_dict(optimizer, engine):
    """``optimizer.state_dict()`` of ``engine``."""
    core = engine.core
    core.require_no_state_away("optimizer.state_dict()")
    engine._settle_schedule()
    members = _members(optimizer, engine)
    numbered = [member for group in members for member in group]
    steps, in_8_bits = _C.native_steps(core), _C.has_8bit_states(core)
    _keep_owed_masters(optimizer, core)
    state, masters, by_element = {}, {}, {}
    for number, member in enumerate(numbered):
        if member is None:
            continue
        if steps is None:
            kept, parts = _of_client(member, core.segment_states)
        else:
            count, parts = max(steps[1][index] for index in member.indices), member.names
            kept = (_as_bitsandbytes if in_8_bits else _as_torch)(member, count) if count else None
        if not kept:
            continue
        state[number], by_element[number] = kept, parts
        if member.dtype in (torch.bfloat16, torch.float16):
            masters[number] = member.shaped(_read(member, "master"))
    first = [sum(len(group) for group in members[:i]) for i in range(len(members))]
    needed = {"eps": 0.0} if in_8_bits else {}  # which bitsandbytes' Lion has, too
    groups = [{**needed, **{k: v for k, v in group.items() if k not in ("params", "param_names")},
               "params": list(range(first[i], first[i] + len(members[i])))}
              for i, group in enumerate(optimizer.param_groups)]
    about = {"rank": engine.global_rank, "world_size": engine.world_size, "stage": engine.zero_optimization_stage(),
             "parts": {number: member.ranges for number, member in enumerate(numbered) if member is not None},
             "by_element": by_element, "masters": masters, "steps": 0 if steps is None else steps[0]}
    return {"state": state, "param_groups": groups, "strata": about}


def _read(member, name):
    """Copies on the host, by part."""
    return [_C.read_state(member.core, index, name, False).cpu() for index in member.indices]


def _as_torch(member, count):
    return {"step": torch.tensor(float(count)), **{name: member.shaped(_read(member, name)) for name in member.names}}


def _as_bitsandbytes(member, count):
    """The states by bitsandbytes' names, which has them for parameters in 32 bits, too; as torch's of Muon."""
    if "exp_avg" not in member.names:
        return _as_torch(member, count)
    kept = {"step": count}
    for number, name in enumerate(member.names, 1):
        parts = [_C.read_codes(member.core, index, name) for index in member.indices]
        if None in parts or any(size % BLOCK8 for size in member.sizes[:-1]):
            kept[f"state{number}"] = member.shaped(_read(member, name))
            continue
        codes, scales = zip(*parts, strict=True)
        kept |= {f"state{number}": member.shaped(codes), f"qmap{number}": map8(name != "exp_avg_sq").clone(),
                 f"absmax{number}": scales[0] if len(scales) == 1 else torch.cat(scales)}
    return kept


def _of_client(member, states):
    """({name: state}, [names of those with one entry an element]): views, as torch gives them."""
    found = [(index, values) for index, _, values in states.entries() if index in member.indices and values]
    kept, parts = {}, []
    if not found:
        return kept, parts
    for key, value in found[0][1].items():
        if not states.is_by_element(found[0][0], value):
            kept[key] = value
            continue
        by_index = {index: states.own(index, values[key]) for index, values in found}
        empty = value.new_empty(0)
        kept[key] = member.shaped([by_index.get(index, empty) for index in member.indices])
        parts.append(key)
    return kept, parts


def load_state_dict(optimizer, engine, saved):
    """``optimizer.load_state_dict(saved)`` of ``engine``."""
    core = engine.core
    core.require_no_state_away("optimizer.load_state_dict()")
    members = _members(optimizer, engine)
    groups = saved["param_groups"]
    if optimizer.halves:
        from .muon import split_groups  # only where there are some

        of_script = types.SimpleNamespace(param_groups=[dict(group) for group in groups], state=saved["state"])
        groups, _ = split_groups(of_script)
    if len(groups) != len(members):
        raise ValueError(f"the optimizer has {len(members)} param groups; found {len(groups)} in the state")
    for i, (group, of_group) in enumerate(zip(groups, members, strict=True)):
        if len(group["params"]) != len(of_group):
            raise ValueError(f"param group {i} has {len(of_group)} parameters; found {len(group['params'])} in the "
                             "state")
    about = saved.get("strata", {})
    pairs = [
        (member, _states_of(member, saved["state"].get(number, {}), group, optimizer),
         (about.get("parts", {}).get(number), about.get("by_element", {}).get(number)), number)
        for group, of_group in zip(groups, members, strict=True)
        for number, member in zip(group["params"], of_group, strict=True) if member is not None]
    _require_this_place(engine, about, pairs)
    if optimizer.inner is None:
        if engine.global_rank == 0 and any(kept for _, kept, *_ in pairs):
            found = (value for _, kept, *_ in pairs for value in kept.values())
            log_conversion(core, any(isinstance(value, Numbers) and value.is_coded for value in found))
            if not about:  # another optimizer's
                kinds = collections.Counter(name for _, kept, *_ in pairs for name in kept if name != "step")
                logger.info("load_state_dict took %s", ", ".join(f"{name} of {n}" for name, n in kinds.items()))
        _load_native(core, pairs, about)
    else:
        _load_client(optimizer, core, pairs)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        set_values(group, copy.deepcopy({k: v for k, v in values.items() if k not in ("params", "param_names")}))
    owed = {}
    for member, _, place, number in pairs:
        if number in about.get("masters", {}):
            master = about["masters"][number]
            owed.update(zip(member.indices, member.parts_of("master", master, place[0], None), strict=True))
    optimizer.owed_masters = owed
    _keep_owed_masters(optimizer, core)


def _states_of(member, kept, group, optimizer):
    """The saved states of a parameter, by the engine's names where the engine updates. UsageError where one is missing,
    or is there that the engine's rule does not have."""
    if optimizer.inner is not None:
        return kept
    kept = engine_states(kept, group, f"'{member.name}'")
    known = {"step", *member.names}
    more = [k for k, v in kept.items() if k not in known and not (isinstance(v, torch.Tensor) and v.numel() == 1)]
    lacking = [name for name in member.names if name not in kept]
    if any(k not in ("step", "use_muon") for k in kept) and (lacking or more):
        raise _C.UsageError(f"load_state_dict: the engine updates '{member.name}' with the states "
                            f"{', '.join(member.names)}; found {', '.join(map(str, kept))}. Load the state of an "
                            "optimizer of the same kind, or a state without this parameter")
    return kept


def _require_this_place(engine, about, pairs):
    """Raises UsageError for parts of another rank, before anything has changed."""
    for member, kept, place, _ in pairs:
        for name, value in kept.items():
            member.parts_of(name, value, *place)
    mine = {"rank": engine.global_rank, "world_size": engine.world_size}
    there = {key: about.get(key, value) for key, value in mine.items()}
    whole = all(place is None or sum(last - first for first, last in place) == member.numel
                for member, _, (place, _), _ in pairs)
    if there != mine and not whole:
        raise _C.UsageError(f"load_state_dict: this state is the part of rank {there['rank']} of {there['world_size']} "
                            f"ranks, and this is rank {mine['rank']} of {mine['world_size']}. Give each rank its own, "
                            "or save with engine.save_checkpoint and load with engine.load_checkpoint, which go from "
                            "any number of ranks to any other")


def _load_native(core, pairs, about):
    values, counts = [], list(_C.native_steps(core)[1])
    most = max([about.get("steps", 0), *(int(kept.get("step", 0)) for _, kept, *_ in pairs)])
    for member, kept, place, _ in pairs:
        # Muon counts no steps, and where its states are there, it has taken some.
        count = int(kept["step"]) if "step" in kept else max(most, 1) if kept else 0
        for index in member.indices:
            counts[index] = count
        for name in member.names:
            zeros = [torch.zeros(n) for n in member.sizes]
            parts = member.parts_of(name, kept[name], *place) if name in kept else zeros
            if parts is None:
                raise _C.UsageError(f"load_state_dict: '{name}' of '{member.name}' has the shape {member.shape}; found "
                                    f"{list(kept[name].shape)}")
            values += [(index, name, part) for index, part in zip(member.indices, parts, strict=True)]
    _C.set_native_steps(core, max([about.get("steps", 0), *counts]), counts)
    for index, name, part in values:
        _C.write_state(core, index, name, False, part.to(core.device, torch.float32).contiguous())


def drop_states(optimizer, engine):
    """Drops the engine's own states; the next step begins with new ones."""
    engine.core.require_no_state_away("optimizer.state.clear()")
    members = [member for group in _members(optimizer, engine) for member in group if member is not None]
    _load_native(engine.core, [(member, {}, (None, None), None) for member in members], {})


def _load_client(optimizer, core, pairs):
    states = core.segment_states
    lent = {index: parameter for index, parameter, _ in states.entries()}
    group_of = {id(p): group for group in optimizer.inner.param_groups for p in group["params"]}
    for member, kept, place, _ in pairs:
        for position, index in enumerate(member.indices):
            if index not in lent:
                continue
            values = {}
            for key, value in kept.items():
                parts = None if optimizer.takes_whole else member.parts_of(key, value, *place)
                if optimizer.takes_whole and states.is_by_element(index, value):
                    values[key] = value.detach().to(lent[index].device, copy=True)
                elif parts is not None:
                    part = parts[position].to(lent[index].device)
                    values[key] = states.from_own(index, part if part.numel() else None)
                elif isinstance(value, torch.Tensor):
                    where = place_of(key, group_of[id(lent[index])], lent[index])
                    values[key] = value.detach().to(where, copy=True)
                else:
                    values[key] = copy.deepcopy(value)
            states.put(index, values)


def _keep_owed_masters(optimizer, core):
    """Gives masters the values of the loaded state, where these round to the weight. The values stay owed until the
    next step, since a script may load the weights after the optimizer."""
    for index, part in optimizer.owed_masters.items():
        if part.numel() == 0:
            continue
        weight = core.local_part(index)
        part = part.to(weight.device, torch.float32)
        master = _C.read_state(core, index, "master", False)
        fits = part.to(weight.dtype) == weight
        _C.store_masters(core, index, torch.where(fits, part, master).contiguous())


def settle_masters(optimizer, core):
    """Before a step: keeps the owed masters that round to the weights, and drops the others."""
    _keep_owed_masters(optimizer, core)
    optimizer.owed_masters = {}
