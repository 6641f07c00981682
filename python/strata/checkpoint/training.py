"""Training checkpoints: the work of ``engine.save_checkpoint`` and ``engine.load_checkpoint``.

The core writes and reads shards. This module adds the script's part: the state of a scheduler and of param groups, the
states of an optimizer of the user's, buffers, and the script's own values."""

import functools
import json
import os

import torch

from .. import _C
from ..model.parameter import flattened
from ..ops.elementwise import place_of, set_values
from ..ranks.runtime import agree_after
from ..views import logger
from .names import state_names
from .plain_values import from_plain, to_plain, written_by
from .supported_transformers import is_transformers_model
from .whole_files import place_script

_SAVING, _LOADING = "saving the checkpoint", "loading the checkpoint"


def save_checkpoint(engine, folder, tag, client_state, save_latest, exclude_frozen_parameters):
    """``engine.save_checkpoint`` is this. Collective; returns True."""
    collectives = engine._collectives
    folder = os.fspath(folder)
    engine._settle_schedule()
    with agree_after(collectives, _SAVING):
        engine._settle_masters()
        engine.core.require_own_memory()
        if tag is None:
            tag = f"global_step{engine.global_steps}"
        if engine._unapplied and engine.global_rank == 0:
            logger.warning("the gradients of the %d micro-steps since the last update are not saved", engine._unapplied)
        tensors, owned = {}, {}  # of rank 0, and of whole parameters that this rank owns
        training = {"client_state": to_plain(dict(client_state or {}), tensors, "client_state"),
                    "scheduler": _scheduler_state(engine, tensors),
                    "optimizer": optimizer_state(engine, tensors, owned),
                    "config": dict(line.split(" = ", 1) for line in engine._config.digest().splitlines()),
                    "written_by": written_by(), "without_frozen": bool(exclude_frozen_parameters)}
        aliases = _aliases(engine)
        extras = [_extra("client", name, 0, t) for name, t in tensors.items()] if engine.global_rank == 0 else []
        buffers = {name: _on_host(b) for name, b in state_names(engine.module)[1].items()}
        states = states_of_segments(engine)
        texts = _texts(engine.module) if engine.global_rank == 0 else []
    if training["optimizer"] is not None and "scalars" in training["optimizer"]:
        # A rank knows the scalars of parameters of which it owns a part.
        of_ranks = collectives.all_gather_text(json.dumps(training["optimizer"]["scalars"]))
        training["optimizer"]["scalars"] = {k: v for text in reversed(of_ranks) for k, v in json.loads(text).items()}
    of_states = [_extra("client", name, engine.global_rank, tensor) for name, tensor in owned.items()]
    extras = _of_rank_0(engine, extras) + _of_owners(engine, of_states) + _extra_buffers(engine, buffers)
    engine.checkpoint_saver().save(folder, str(tag), json.dumps(training), aliases, extras, states, texts,
                                   not exclude_frozen_parameters, save_latest)
    if engine.global_rank == 0:
        place_script(folder)
    return True


def load_checkpoint(engine, folder, tag, strict, optimizer_states, scheduler_states, module_only):
    """``engine.load_checkpoint`` is this. Collective. Returns (path of the checkpoint, client state); (None, None)
    where the folder has no ``latest``."""
    collectives = engine._collectives
    engine.wait_for_checkpoint()  # it may be the one to load
    _require_same_tag(collectives, tag)
    path = None
    with agree_after(collectives, _LOADING):
        if tag is not None or engine.global_rank == 0:  # `latest` may change while ranks read it
            path = _find(os.fspath(folder), tag)
    paths = collectives.all_gather_text(path or "")
    if not paths[0]:
        if engine.global_rank == 0:
            logger.warning("there is no checkpoint to load: '%s' has no file 'latest'; give a tag, or train from the "
                           "start", folder)
        return None, None
    checkpoint = _C.TrainingCheckpoint(collectives, paths[0])
    training = json.loads(checkpoint.training)
    optimizer_states = optimizer_states and not module_only and isinstance(engine.optimizer, torch.optim.Optimizer)

    @functools.cache
    def read_client(name):
        return checkpoint.read("client", name)

    if optimizer_states:  # makes room for states of parameters that are frozen here, and were unfrozen in that job
        trained = {name for role, name, _, _, trains, _ in checkpoint.tensors() if role == "parameter" and trains}
        engine.core.train([i for i in range(len(engine._described)) if engine.core.known_name(i) in trained])
    with agree_after(collectives, _LOADING):  # every check comes before the first value is stored
        targets, tensors = targets_of_segments(engine, checkpoint) if optimizer_states else ([], [])
        client_state = from_plain(training.get("client_state", {}), read_client)
        optimizer = from_plain(_of_this_rank(engine, training), read_client) if optimizer_states else None
        scheduler = from_plain(training.get("scheduler"), read_client) if scheduler_states and not module_only else None
        require_same_groups(engine, optimizer)
        specs, values = _read_buffers(engine, checkpoint)
        if optimizer_states and engine.optimizer.inner is None:
            _require_same_states(engine, checkpoint)
        _log_differences(engine, checkpoint, specs, strict, optimizer_states)
    checkpoint.load(engine.core, optimizer_states, strict, bool(training.get("without_frozen")), targets, specs)
    try:
        with agree_after(collectives, _LOADING):
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
            if not module_only:
                checkpoint.restore_progress(engine.core)
                engine._unapplied = 0
            if optimizer_states:
                checkpoint.restore_optimizer_steps(engine.core)
                load_optimizer(engine, optimizer, tensors)
            if scheduler is not None:
                _load_scheduler(engine, scheduler)
    except Exception as error:
        _C.loading_failed(engine.core, str(error))
        raise
    return paths[0], client_state


# --- the folder ---


def _find(folder, tag):
    """The checkpoint's path; None: there is none, and ``tag`` is None."""
    tag = _C.latest_tag(folder) if tag is None else tag
    if tag is None:
        return None
    if (path := _C.find_checkpoint(folder, str(tag))) is not None:
        return path
    own = os.path.join(folder, str(tag))
    if os.path.isdir(own) and any("model_states" in name or "optim_states" in name for name in os.listdir(own)):
        raise _C.UsageError(f"'{own}' is a checkpoint of DeepSpeed; convert it once: strata import-deepspeed {own} OUT")
    tags = _C.whole_checkpoints(folder)
    there = f"there are {', '.join(tags[-8:])}" if tags else "there is none at all"
    raise _C.IoError(f"there is no whole checkpoint '{tag}' in '{folder}'; {there}")


def _require_same_tag(collectives, tag):
    """Raises UsageError on every rank where ranks ask for different checkpoints."""
    asked = [json.loads(text) for text in collectives.all_gather_text(json.dumps(None if tag is None else str(tag)))]
    for rank, other in enumerate(asked):
        if other != asked[0]:
            names = ["no tag" if t is None else f"'{t}'" for t in (asked[0], other)]
            raise _C.UsageError("the ranks ask for different checkpoints; give the same tag on every rank; rank 0 has "
                                f"{names[0]}, rank {rank} has {names[1]}")


_NAMED = 8  # names that a warning lists


def _log_differences(engine, checkpoint, buffers, strict, optimizer_states):
    if engine.global_rank != 0:
        return
    if not strict:
        for things, unlike in zip(("parameters", "buffers"), checkpoint.differences(engine.core, buffers)):
            for what, names in zip(("not in the checkpoint", "not in the model", "of another shape"), unlike):
                if not names:
                    continue
                more = len(names) - _NAMED
                logger.warning("%d %s are %s and were skipped: %s%s", len(names), things, what,
                               ", ".join(names[:_NAMED]),
                               f" and {more} more, which are logged at level INFO" if more > 0 else "")
                if more > 0:
                    logger.info("%s that are %s: %s", things, what, ", ".join(names))
    if optimizer_states and engine.optimizer.inner is None:
        if set(_C.state_names(engine.core)) <= set(checkpoint.kinds):
            log_conversion(engine.core, any(kind.endswith(".scales") for kind in checkpoint.kinds))
        lacking = sorted(set(_C.state_names(engine.core)) - set(checkpoint.kinds))
        if lacking and json.loads(checkpoint.training).get("global_steps"):
            logger.warning("the checkpoint has no states %s of the optimizer; they begin at zero", ", ".join(lacking))


def _require_same_states(engine, checkpoint):
    """UsageError where the checkpoint has states of a parameter, but not those with which this optimizer updates it,
    though it has such states of others. States that it has of no parameter begin at zero, with a warning."""
    unlike = []
    for index in range(len(engine._described)):
        name, wanted = engine.core.known_name(index), _C.state_names(engine.core, index)
        found = [k for k in checkpoint.kinds[1:] if not k.endswith(".scales") and checkpoint.has(name, k)]
        trains = engine._described[index][1].requires_grad
        if trains and found and any(kind not in found and kind in checkpoint.kinds for kind in wanted):
            unlike.append((name, found, wanted))
    if not unlike:
        return
    name, found, wanted = unlike[0]
    raise _C.UsageError(
        f"the checkpoint has {', '.join(found)} of '{name}', and this optimizer updates it with {', '.join(wanted)}. "
        "Update it by the same rule (of Muon: parameter.use_muon = True, or False), or ask for "
        f"load_optimizer_states=False; parameters so: {', '.join(name for name, *_ in unlike[:_NAMED])}"
        + (f" and {len(unlike) - _NAMED} more" if len(unlike) > _NAMED else ""))


def log_conversion(core, saved_in_8_bits):
    """Warns where a saved state and the engine keep states in different numbers of bits."""
    if saved_in_8_bits != _C.has_8bit_states(core):
        logger.warning("the saved optimizer states have %d bits, and this optimizer keeps them in %d: they were "
                       "converted", *((8, 32) if saved_in_8_bits else (32, 8)))


# --- buffers and names ---


def _read_buffers(engine, checkpoint):
    """([(name in the checkpoint, shape)] of the model's buffers; [(buffer, its new value)] of those that the checkpoint
    has with the same shape). A buffer that the checkpoint lacks has its first name in the model."""
    there = {(role, name): list(shape) for role, name, shape, *_ in checkpoint.tensors()}
    same_world = checkpoint.world_size == engine.world_size
    by_tensor = {}
    for name, buffer in state_names(engine.module)[1].items():
        by_tensor.setdefault(id(buffer), (buffer, []))[1].append(name)
    specs, values = [], []
    for buffer, known in by_tensor.values():
        names = [name for name in known if ("buffer", name) in there] or known[:1]
        specs += [(name, list(buffer.shape)) for name in names]
        own = "rank buffer", f"{engine.global_rank}:{names[0]}"
        found = own if same_world and own in there else ("buffer", names[0])
        if there.get(found) == list(buffer.shape):
            values.append((buffer, checkpoint.read(*found)))
    return specs, values


def _aliases(engine):
    """By parameter of the engine: its other names in the model."""
    known_by = {id(known.parameter): known for known in engine.known}
    aliases = [[] for _ in engine._described]
    for name, parameter in state_names(engine.module)[0].items():
        known = known_by.get(id(parameter))
        if known is not None and name != engine.core.known_name(known.parts[0].index):
            for part in known.parts:
                aliases[part.index].append(name)
    return aliases


def _extra(role, name, rank, tensor):
    """A tensor beside the parameters as the core takes it."""
    tensor = _on_host(tensor)
    return role, name, rank, list(tensor.shape), tensor.dtype, tensor


def _of_rank_0(engine, extras):
    """Rank 0's list on every rank; the others write none of it."""
    listed = json.dumps([[*entry[:4], str(entry[4]).removeprefix("torch.")] for entry in extras])
    there = json.loads(engine._collectives.all_gather_text(listed)[0])
    return extras or [(*entry[:4], getattr(torch, entry[4]), None) for entry in there]


def _of_owners(engine, extras):
    """The lists of all ranks, joined; what several ranks have, as those of other shard groups do, the first writes."""
    listed = json.dumps([[*entry[:4], str(entry[4]).removeprefix("torch.")] for entry in extras])
    there, mine = {}, {entry[1]: entry for entry in extras}
    for text in engine._collectives.all_gather_text(listed):
        for entry in json.loads(text):
            there.setdefault(entry[1], entry)
    return [mine[name] if entry[2] == engine.global_rank else (*entry[:4], getattr(torch, entry[4]), None)
            for name, entry in there.items()]


def _extra_buffers(engine, buffers):
    """Rank 0's buffers, and those of other ranks that differ from these: each rank loads its own."""
    mine = {name: f"{_C.fingerprint(b)} {list(b.shape)} {b.dtype}" for name, b in buffers.items()}
    of_ranks = [json.loads(text) for text in engine._collectives.all_gather_text(json.dumps(mine))]
    extras = [_extra("buffer", name, 0, b) for name, b in buffers.items()]
    for other, theirs in enumerate(of_ranks):
        for name, b in buffers.items():
            if theirs.get(name) != of_ranks[0].get(name):
                extras.append(_extra("rank buffer", f"{other}:{name}", other, b))
    return extras


def _on_host(tensor):
    return tensor.detach().to("cpu").contiguous()


def _texts(model):
    """[(name, content)] of small files with which other programs can use the checkpoint."""
    if not is_transformers_model(model):
        return []
    configs = {"config.json": model.config, "generation_config.json": getattr(model, "generation_config", None)}
    return [(name, config.to_json_string(use_diff=True)) for name, config in configs.items() if config is not None]


# --- the scheduler ---


def _scheduler_state(engine, tensors):
    scheduler = engine.lr_scheduler
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": to_plain(scheduler.state_dict(), tensors, "scheduler")}


def _load_scheduler(engine, saved):
    if engine.lr_scheduler is None or not hasattr(engine.lr_scheduler, "load_state_dict"):
        return
    if saved["class"] not in (None, type(engine.lr_scheduler).__name__) and engine.global_rank == 0:
        logger.warning("the checkpoint's scheduler is a %s, this one a %s", saved["class"],
                       type(engine.lr_scheduler).__name__)
    engine.lr_scheduler.load_state_dict(saved["state"])


# --- the optimizer's part: param groups, and the states of an optimizer of the user's ---

# The core writes and reads states that have as many elements as the parameter. States of one element are within the
# JSON; those that are tensors keep their dtype.

def optimizer_state(engine, tensors, owned):
    """Param groups, and the states of the user's optimizer that do not have one entry for each element. Tensors go to
    ``tensors``, or to ``owned`` where this rank alone has them."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):  # none, or the stand-in's placeholder
        return None
    groups = [{k: to_plain(v, tensors, f"optimizer.param_groups[{i}].{k}") for k, v in group.items() if k != "params"}
              for i, group in enumerate(optimizer.param_groups)]
    state = {"class": type(optimizer.inner or optimizer).__name__, "param_groups": groups, "members": _members(engine)}
    if optimizer.inner is not None:
        mine, states = {}, engine.core.segment_states
        for index, _, values in states.entries():
            name = engine.core.known_name(index)
            scalars = {k: v for k, v in values.items() if not states.is_by_element(index, v)}
            if optimizer.takes_whole:  # they may have any shape
                mine[name] = {k: to_plain(v, None if isinstance(v, torch.Tensor) and v.numel() == 1 else owned,
                                          f"optimizer.{name}.{k}") for k, v in scalars.items()}
            else:
                mine[name] = {k: to_plain(_scalar(v, name, k), None, f"{name}.{k}") for k, v in scalars.items()}
        state["scalars"] = mine  # of this rank's parameters: their tensors are within the JSON
        state["scalars_as_they_are"] = True  # importers write numbers where the optimizer had tensors
    return state


def _members(engine):
    """[[names]] of each param group's parameters, in its order: exports to flat formats need it."""
    known_by = {id(known.parameter): known for known in engine.known}
    return [[engine.core.known_name(part.index) for p in group if id(p) in known_by for part in known_by[id(p)].parts]
            for group in engine.optimizer.members]


def _scalar(value, name, key):
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise _C.UsageError(f"the optimizer's state '{key}' of '{name}' has {value.numel()} elements; kept are states "
                            "of one element, and of as many as the parameter has")
    return value


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
        for kind in (kind for kind in checkpoint.kinds[1:] if not kind.endswith(".scales")):
            dtype = checkpoint.dtype_of(name, kind)
            if dtype is None:
                continue
            first, last = _C.state_range(engine.core, index)
            if engine.optimizer.takes_whole or checkpoint.dtype_of(name, f"{kind}.scales") is not None:
                flat = flattened(engine.core, index, checkpoint.read("parameter", name, kind)).to(parameter.device)
                tensors.append((index, kind, flat if engine.optimizer.takes_whole else flat[first:last].clone()))
                continue
            tensors.append((index, kind, torch.zeros(last - first, dtype=dtype, device=parameter.device)))
            if first < last:
                targets.append(tensors[-1])
    return targets, tensors


def _of_this_rank(engine, training):
    """The optimizer's part of ``training``, with the states of this rank's parameters alone."""
    saved = training.get("optimizer")
    if saved is None or engine.optimizer.inner is None:
        return saved
    names = {engine.core.known_name(index) for index, _, _ in engine.core.segment_states.entries()}
    return {**saved, "scalars": {k: v for k, v in saved.get("scalars", {}).items() if k in names}}


def load_optimizer(engine, saved, tensors):
    optimizer = engine.optimizer
    if saved is None:
        return
    for owner in (optimizer, optimizer.inner or optimizer):  # two may share their groups
        for group, values in zip(owner.param_groups, saved["param_groups"]):
            set_values(group, values)
    if optimizer.inner is None:
        return
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
