"""Checkpoints that training goes on from: what ``engine.save_checkpoint`` and ``engine.load_checkpoint`` do.

The engine writes and reads shards; here is what belongs to the script: the state of a scheduler and of param groups,
what an optimizer of the user's keeps, buffers, and the script's own values.
"""

import json
import logging
import os

import torch

from .. import _C
from ..ranks.joint import together
from .names import state_names
from .fp32_script import place_script
from .plain_values import from_plain, to_plain
from .supported_transformers import is_transformers_model

logger = logging.getLogger("strata")

_SAVING, _LOADING = "saving the checkpoint", "loading the checkpoint"


def save_checkpoint(engine, folder, tag, client_state, save_latest, exclude_frozen_parameters):
    """``engine.save_checkpoint`` is this. Collective; returns True."""
    collectives = engine._collectives
    folder = os.fspath(folder)
    engine._settle_schedule()
    with together(collectives, _SAVING):
        engine.core.require_own_memory()
        if tag is None:
            tag = f"global_step{engine.global_steps}"
        if engine._unapplied and engine.global_rank == 0:
            logger.warning("the gradients of the %d micro-steps since the last update are not saved", engine._unapplied)
        tensors = {}
        training = {
            "client_state": to_plain(dict(client_state or {}), tensors, "client_state"),
            "scheduler": _scheduler_state(engine, tensors),
            "optimizer": _optimizer_state(engine, tensors),
            "config": dict(line.split(" = ", 1) for line in engine._config.digest().splitlines()),
            "written_by": {"strata": _version(), "torch": torch.__version__},
            "without_frozen": bool(exclude_frozen_parameters),
        }
        aliases = _aliases(engine)
        extras = [_extra("client", name, 0, t) for name, t in tensors.items()] if engine.global_rank == 0 else []
        buffers = {name: _on_host(b) for name, b in _buffers(engine).items()}
        states = _states_of_segments(engine)
        texts = _texts(engine.module) if engine.global_rank == 0 else []
    if training["optimizer"] is not None and "scalars" in training["optimizer"]:
        training["optimizer"]["scalars"] = _of_all_ranks(engine, training["optimizer"]["scalars"])
    extras = _of_rank_0(engine, extras) + _extra_buffers(engine, buffers)
    engine.checkpoint_saver().save(
        folder, str(tag), json.dumps(training), aliases, extras, states, texts, not exclude_frozen_parameters,
        save_latest,
    )  # fmt: skip
    if engine.global_rank == 0:
        place_script(folder)
    return True


def load_checkpoint(engine, folder, tag, strict, optimizer_states, scheduler_states, module_only):
    """``engine.load_checkpoint`` is this. Collective.

    Returns:
        (path of the checkpoint, client state); (None, None) where the folder has no ``latest``.
    """
    collectives = engine._collectives
    engine.wait_for_checkpoint()  # it may be the one to load
    with together(collectives, _LOADING):
        path = _find(os.fspath(folder), tag)
    paths = collectives.all_gather_text(path or "")
    if not paths[0]:
        if engine.global_rank == 0:
            logger.warning("there is no checkpoint to load: '%s' has no file 'latest'; give a tag, or train from the "
                           "start", folder)
        return None, None
    checkpoint = _C.TrainingCheckpoint(collectives, paths[0])
    training = json.loads(checkpoint.training)
    optimizer_states = optimizer_states and not module_only and engine.optimizer is not None
    with together(collectives, _LOADING):
        targets, tensors = _targets_of_segments(engine, checkpoint) if optimizer_states else ([], [])
        _tell_of_differences(engine, checkpoint, strict, optimizer_states)
    checkpoint.load(engine.core, optimizer_states, strict, bool(training.get("without_frozen")), targets)
    read = {}

    def read_client(name):
        if name not in read:
            read[name] = checkpoint.read("client", name)
        return read[name]

    with together(collectives, _LOADING):
        _load_buffers(engine, checkpoint)
        if not module_only:
            checkpoint.restore_progress(engine.core)
            engine._unapplied = 0
        if optimizer_states:
            checkpoint.restore_optimizer_steps(engine.core)
            _load_optimizer(engine, training.get("optimizer"), targets, tensors, read_client)
        if scheduler_states and not module_only:
            _load_scheduler(engine, training.get("scheduler"), read_client)
        client_state = from_plain(training.get("client_state", {}), read_client)
    return paths[0], client_state


# --- what is in the folder ---


def _find(folder, tag):
    """The checkpoint's path; None: there is none, and nobody named one."""
    if tag is None:
        tag = _C.latest_tag(folder)
        if tag is None:
            return None
    path = _C.find_checkpoint(folder, str(tag))
    if path is not None:
        return path
    own = os.path.join(folder, str(tag))
    if os.path.isdir(own) and any("model_states" in name or "optim_states" in name for name in os.listdir(own)):
        raise _C.UsageError(f"'{own}' is a checkpoint of DeepSpeed; convert it once: strata import-deepspeed {own} OUT")
    tags = _C.whole_checkpoints(folder)
    there = f"there are {', '.join(tags[-8:])}" if tags else "there is none at all"
    raise _C.IoError(f"there is no whole checkpoint '{tag}' in '{folder}'; {there}")


def _tell_of_differences(engine, checkpoint, strict, optimizer_states):
    if engine.global_rank != 0:
        return
    if not strict:
        for what, names in zip(("not in the checkpoint", "not in the model", "of another shape"),
                               checkpoint.differences(engine.core)):
            if names:
                logger.warning("%d parameters are %s and were skipped: %s%s", len(names), what, ", ".join(names[:8]),
                               ", ..." if len(names) > 8 else "")
    if optimizer_states and engine.optimizer.inner is None and not {"exp_avg", "exp_avg_sq"} <= set(checkpoint.kinds):
        if json.loads(checkpoint.training).get("global_steps"):
            logger.warning("the checkpoint has no states of Adam; they begin at zero")


# --- buffers and names ---


def _buffers(engine):
    """{name: persistent buffer of the model}."""
    return dict(state_names(engine.module)[1])


def _load_buffers(engine, checkpoint):
    there = {(role, name) for role, name, *_ in checkpoint.tensors()}
    same_world = checkpoint.world_size == engine.world_size
    with torch.no_grad():
        for name, buffer in _buffers(engine).items():
            own = "rank buffer", f"{engine.global_rank}:{name}"
            found = own if same_world and own in there else ("buffer", name)
            if found in there:
                buffer.copy_(checkpoint.read(*found).view(buffer.shape))


def _aliases(engine):
    """By parameter: its other names in the model."""
    index_of = {id(entry[1]): i for i, entry in enumerate(engine._described)}
    aliases = [[] for _ in engine._described]
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        index = index_of.get(id(parameter))
        if index is not None and name != engine._described[index][0]:
            aliases[index].append(name)
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


def _extra_buffers(engine, buffers):
    """Rank 0's buffers, and those of other ranks that differ from these: a rank goes on with its own."""
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
    """[(name, content)] of small files that make the checkpoint of use elsewhere."""
    texts = []
    if is_transformers_model(model):
        texts.append(("config.json", model.config.to_json_string(use_diff=True)))
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            texts.append(("generation_config.json", generation.to_json_string(use_diff=True)))
    return texts


def _version():
    from importlib import metadata

    try:
        return metadata.version("strata-train")
    except metadata.PackageNotFoundError:
        return "of a build folder"


# --- the scheduler ---


def _scheduler_state(engine, tensors):
    scheduler = engine.lr_scheduler
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": to_plain(scheduler.state_dict(), tensors, "scheduler")}


def _load_scheduler(engine, saved, read):
    if engine.lr_scheduler is None or saved is None or not hasattr(engine.lr_scheduler, "load_state_dict"):
        return
    if saved["class"] not in (None, type(engine.lr_scheduler).__name__) and engine.global_rank == 0:
        logger.warning("the checkpoint's scheduler is a %s, this one a %s", saved["class"],
                       type(engine.lr_scheduler).__name__)
    engine.lr_scheduler.load_state_dict(from_plain(saved["state"], read))


# --- the optimizer ---


def _optimizer_state(engine, tensors):
    """Param groups, and of an optimizer of the user's what is not kept element by element."""
    optimizer = engine.optimizer
    if optimizer is None:
        return None
    groups = [
        {k: to_plain(v, tensors, f"optimizer.param_groups[{i}].{k}") for k, v in group.items() if k != "params"}
        for i, group in enumerate(optimizer.param_groups)
    ]
    state = {"class": type(optimizer.inner or optimizer).__name__, "param_groups": groups}
    if optimizer.inner is not None:
        mine = {}
        for index, segment, values in _segments(engine):
            name = engine.core.parameter_name(index)
            scalars = {k: v for k, v in values.items() if not _by_element(v, segment)}
            mine[name] = {k: to_plain(_scalar(v, name, k), tensors, f"{name}.{k}") for k, v in scalars.items()}
        state["scalars"] = mine
    return state


def _scalar(value, name, key):
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise _C.UsageError(f"the optimizer's state '{key}' of '{name}' has {value.numel()} elements; kept are states "
                            "of one element, and of as many as the parameter has")
    return value.item()


def _by_element(value, segment):
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == segment.numel()


def _of_all_ranks(engine, mine):
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


def _states_of_segments(engine):
    if engine.optimizer is None or engine.optimizer.inner is None:
        return []
    return [
        (param, key, value.detach().contiguous())
        for param, segment, values in _segments(engine) for key, value in values.items() if _by_element(value, segment)
    ]  # fmt: skip


def _targets_of_segments(engine, checkpoint):
    """([(parameter, kind, tensor to fill)], [(segment, key, the same tensor)])."""
    targets, tensors = [], []
    if engine.optimizer.inner is None:
        return targets, tensors
    for param, segment, _ in _segments(engine):
        name = engine.core.parameter_name(param)
        for kind in checkpoint.kinds[1:]:
            dtype = checkpoint.dtype_of(name, kind)
            if dtype is not None:
                tensors.append((segment, kind, torch.zeros(segment.shape, dtype=dtype, device=segment.device)))
                targets.append((param, kind, tensors[-1][2]))
    return targets, tensors


def _load_optimizer(engine, saved, targets, tensors, read):
    optimizer = engine.optimizer
    if saved is None:
        return
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise _C.UsageError(f"the optimizer has {len(optimizer.param_groups)} param groups, the checkpoint's had "
                            f"{len(groups)}; make them alike, or ask for load_optimizer_states=False")
    for group, values in zip(optimizer.param_groups, groups):
        group.update({k: from_plain(v, read) for k, v in values.items()})
    if optimizer.inner is None:
        return
    if optimizer.inner.param_groups is not optimizer.param_groups:
        for group, values in zip(optimizer.inner.param_groups, groups):
            group.update({k: from_plain(v, read) for k, v in values.items()})
    by_segment = {}
    for segment, key, tensor in tensors:
        by_segment.setdefault(id(segment), {})[key] = tensor
    scalars = saved.get("scalars", {})
    for param, segment, present in _segments(engine):
        values = {k: from_plain(v, read) for k, v in scalars.get(engine.core.parameter_name(param), {}).items()}
        for key, value in values.items():  # torch's optimizers count steps in tensors
            values[key] = torch.tensor(float(value)) if key == "step" and not isinstance(value, torch.Tensor) else value
        values.update(by_segment.get(id(segment), {}))
        if values:
            optimizer.inner.state[segment] = values
