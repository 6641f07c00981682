"""Converts checkpoints of DeepSpeed's ZeRO, stages 1 to 3 and universal ones, to checkpoints of Strata."""

import json
import math
import os
import re
from dataclasses import dataclass

import torch

from .. import _C
from ..checkpoint.plain_values import written_by
from .deepspeed_states import FlatStates, UniversalStates
from .whole_tensors import (VALUE, Stored, WholeCheckpoint, WholeTensor, client_tensors, load_tensors, optimizer_steps,
                            optimizer_values, plain_values, stored, write_checkpoint)

# Keys that DeepSpeed itself writes into a model's file; all others are the script's.
_OWN_KEYS = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
             "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
             "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
             "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
             "ds_autoep_layers", "autoep_layers"}


def import_deepspeed(checkpoint, out, tag=None):
    """Writes a checkpoint of DeepSpeed as one of Strata, which ``engine.load_checkpoint(out)`` loads at any number of
    ranks and any stage. About one tensor is in memory at a time. Returns the path of the new checkpoint. FormatError
    where the folder is no such checkpoint, is damaged, holds objects other than data, or is of a model that is also cut
    by another kind of parallelism. IoError where a file is missing.

    Args:
        checkpoint: DeepSpeed's folder, that of all tags or of one.
        out: folder of Strata's checkpoints, made if need be; the tag stays the same.
        tag: default: the one that ``latest`` names.
    """
    return write_checkpoint(read_deepspeed(checkpoint, tag), os.fspath(out))


def read_deepspeed(checkpoint, tag=None, values_only=False):
    """The WholeCheckpoint that a folder of DeepSpeed holds; arguments and errors as of ``import_deepspeed``.
    ``values_only``: without the optimizer's states, of whatever kind they are."""
    files = find_deepspeed_files(checkpoint, tag)
    try:
        model = ModelFiles(files.model)
        states = FlatStates(files.optimizer, model) if files.universal is None else UniversalStates(files.universal)
        return _assemble(files, model, states, values_only)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _C.FormatError(f"'{files.folder}' is not as DeepSpeed 0.19 writes it: {type(error).__name__}: "
                             f"{error}") from error


# --- the whole checkpoint ---


def _assemble(files, model, states, values_only):
    aliases = model.aliases()
    tensors, steps, scalars = [], {}, {}
    counted = max((group.get("step", 0) for group in states.param_groups or []), default=0)  # there by FusedAdam
    counted = counted or int(model.first.get("global_steps") or 0) - int(model.first.get("skipped_steps") or 0)
    for group in model.shapes:
        for name, shape in group.items():
            kinds = states.kinds_of(name, shape, values_only)
            dtype = model.first["module"].get(name, kinds[VALUE]).dtype  # in which the model computes
            tensors.append(WholeTensor(name, shape, dtype, kinds, trainable=True, aliases=aliases.get(name, [])))
            scalars[name] = {} if values_only else states.scalars_of(name)
            steps[name] = int(scalars[name].get("step", counted))
    if not values_only:
        _require_muon(files, states, model, {tensor.name: tensor.kinds for tensor in tensors}, steps)
    frozen = model.frozen()
    tensors += [WholeTensor(n, shape, s.dtype, {VALUE: s}, aliases=aliases.get(n, [])) for n, shape, s in frozen]
    tensors += model.buffers()
    beside = {}
    training = _training_of(model, states, beside, steps, scalars)
    training["without_frozen"] = not frozen
    world = len(files.optimizer) or int(model.first.get("dp_world_size") or 1)
    return WholeCheckpoint(files.tag, tensors + client_tensors(beside), training, world, states.stage)


def _require_muon(files, states, model, kinds, steps):
    """FormatError where a group of DeepSpeed's Muon has taken steps, and the files lack its states."""
    groups = [group for group in states.param_groups or [] if "use_muon" in group]
    for group, names in zip(states.param_groups or [], _members(states.param_groups or [], model.shapes) or []):
        wanted = "momentum_buffer" if group.get("use_muon") else "exp_avg"
        lacking = [name for name in names if groups and steps[name] > 0 and wanted not in kinds[name]]
        if lacking:
            raise _C.FormatError(f"'{files.folder}' has no {wanted} of '{lacking[0]}', which has taken "
                                 f"{steps[lacking[0]]} steps, and of {len(lacking) - 1} more: where states rest on a "
                                 "drive, save with DeepSpeed's save_muon_momentum_buffer_in_memory")


def _training_of(model, states, beside, steps, scalars):
    first = model.first
    config = first.get("ds_config") if isinstance(first.get("ds_config"), dict) else {}
    global_steps = int(first.get("global_steps") or 0)
    own = {k: v for k, v in first.items() if k not in _OWN_KEYS}
    training = {"client_state": plain_values(own, beside, "client_state"), "scheduler": None, "optimizer": None,
                "config": _flattened(config), "written_by": written_by(deepspeed=str(first.get("ds_version"))),
                "global_steps": global_steps,
                "micro_steps": global_steps * _accumulation_steps(config, int(first.get("dp_world_size") or 1)),
                "skipped_steps": int(first.get("skipped_steps") or 0), "optimizer_steps": optimizer_steps(steps)}
    if isinstance(first.get("lr_scheduler"), dict):
        # The configuration's scheduler; DeepSpeed does not write the class of a script's.
        name = "ScheduledLR" if config.get("scheduler") else None
        training["scheduler"] = {"class": name, "state": plain_values(first["lr_scheduler"], beside, "scheduler")}
    if states.param_groups is not None:
        section = config.get("optimizer")
        of_class = section.get("type") if isinstance(section, dict) else None
        training["optimizer"] = optimizer_values(of_class, states.param_groups, ("params", "step"), scalars, beside)
        members = _members(states.param_groups, model.shapes)
        if members is not None:
            training["optimizer"]["members"] = members
    scaler = states.loss_scaler
    training["loss_scale"] = float(getattr(scaler, "cur_scale", 1.0))
    if getattr(scaler, "dynamic", False):
        training["loss_scaler"] = {"scale": training["loss_scale"], "iteration": int(scaler.cur_iter),
                                   "last_overflow": int(scaler.last_overflow_iter),
                                   "hysteresis_left": int(scaler.cur_hysteresis)}
    return training


def _members(param_groups, shapes):
    """[[names]] of each param group; None where the file does not say which flat tensors a group has."""
    flats = [group.get("params", []) for group in param_groups]
    if sorted(flat for own in flats for flat in own) != list(range(len(shapes))):
        return [[name for named in shapes for name in named]] if len(flats) == 1 else None
    return [[name for flat in own for name in shapes[flat]] for own in flats]


def _accumulation_steps(config, world_size):
    steps, batch = config.get("gradient_accumulation_steps"), config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu")
    if isinstance(steps, int):
        return steps
    return max(1, batch // (micro * world_size)) if isinstance(batch, int) and isinstance(micro, int) else 1


def _flattened(config, prefix=""):
    """{"a.b": JSON} of a nested configuration."""
    result = {}
    for key, value in config.items():
        if isinstance(value, dict):
            result.update(_flattened(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = json.dumps(value, default=str)
    return result


# --- the files of a checkpoint, and refusals of those that Strata cannot read ---

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_MODEL = re.compile(r"(?P<rank>)mp_rank_(?P<mp>\d+)_model_states\.pt")
_OF_PARTS = (  # files of models that are cut by another kind of parallelism than ZeRO
    (re.compile(r"mp_rank_\d+_\d+_model_states\.pt|layer_\d+-model.*\.pt"), "pipeline parallelism"),
    (re.compile(r"expp_rank_\d+_.*|layer_\d+_expert_\d+_.*|expert_\d+_mp_rank_.*"), "expert parallelism"),
)
_LATEST = ("latest", "latest_universal")


@dataclass
class DeepSpeedFiles:
    """Paths of one checkpoint."""

    folder: str
    tag: str
    model: list  # of rank 0, or of every rank at stage 3
    optimizer: list  # of every rank; empty where ``universal``
    universal: str | None  # the folder ``zero`` of a universal checkpoint


def find_deepspeed_files(folder, tag=None):
    """The DeepSpeedFiles of a checkpoint. Arguments as of ``import_deepspeed``; ``latest_universal`` may name the tag,
    too. IoError where there is no such folder, or a file is missing. FormatError where it holds no checkpoint of
    DeepSpeed's ZeRO, or one that is cut by another kind of parallelism."""
    folder = os.path.normpath(os.fspath(folder))
    if not os.path.isdir(folder):
        raise _C.IoError(f"there is no folder '{folder}'")
    if tag is None:
        of_one_tag = (pattern.fullmatch(name) for pattern in (_OPTIMIZER, _SHARDED_MODEL, _MODEL)
                      for name in os.listdir(folder))
        folder, tag = os.path.split(os.path.abspath(folder)) if any(of_one_tag) else (folder, _latest(folder))
    if os.path.basename(tag) != tag or tag in (os.curdir, os.pardir):
        raise _C.FormatError(f"'{folder}': the tag '{tag}' is no name of a folder")
    path = os.path.join(folder, tag)
    if not os.path.isdir(path):
        raise _C.IoError(f"there is no folder '{path}'; give the tag of a checkpoint that is in '{folder}'")
    return _files_of(path, tag)


def _latest(folder):
    for path in filter(os.path.isfile, (os.path.join(folder, name) for name in _LATEST)):
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000).strip()
    raise _C.FormatError(f"'{folder}' is no folder of DeepSpeed's checkpoints: wanted a file 'latest' there that names "
                         "one, or the files of one ('mp_rank_00_model_states.pt'); or give the tag")


def _files_of(path, tag):
    names = sorted(os.listdir(path))
    for pattern, what in _OF_PARTS:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise _C.FormatError(f"'{path}' is of a model under {what} ('{found[0]}'), which this version does not "
                                 "import; export it with DeepSpeed's ds_to_universal or save it without")
    optimizer = _by_rank(path, names, _OPTIMIZER)
    model = _by_rank(path, names, _SHARDED_MODEL) or _by_rank(path, names, _MODEL)
    universal = os.path.join(path, "zero")
    universal = universal if os.path.isdir(universal) else None
    if not model:
        what = "the files of its model are missing" if optimizer or universal else "it is no checkpoint of DeepSpeed"
        raise _C.FormatError(f"'{path}': {what}: wanted 'mp_rank_00_model_states.pt', or at stage 3 "
                             "'zero_pp_rank_0_mp_rank_00_model_states.pt'")
    if not optimizer and universal is None:
        raise _C.FormatError(f"'{path}' has no '*_optim_states.pt': it was saved without ZeRO, or without states of "
                             "its optimizer. Load 'module' of its model_states.pt with torch.load and begin with these "
                             "weights")
    return DeepSpeedFiles(path, tag, model, optimizer, universal)


def _by_rank(path, names, pattern):
    """Paths by rank; raises an error where a rank's file is missing."""
    by_rank = {}
    for found in filter(None, map(pattern.fullmatch, names)):
        if int(found["mp"]) > 0:
            raise _tensor_parallel(path, f"'{found[0]}'")
        by_rank[int(found["rank"] or 0)] = found[0]
    for rank in range(max(by_rank, default=-1) + 1):
        if rank not in by_rank:
            there = next(iter(by_rank.values()))
            raise _C.IoError(f"'{path}': the file of rank {rank} is missing; there is '{there}', and so on up to rank "
                             f"{max(by_rank)}")
    return [os.path.join(path, by_rank[rank]) for rank in sorted(by_rank)]


def _tensor_parallel(path, sign):
    return _C.FormatError(f"'{path}' is of a model under tensor parallelism ({sign}), which this version does not "
                          "import; make it whole in DeepSpeed first")


# --- the model: names and shapes, buffers, frozen and tied parameters ---


class ModelFiles:
    """The contents of the model's files. ``shapes``: [{name: shape}] of the trained parameters, by param group, or
    sub-group at stage 3, in the order of the flat tensors. ``of_ranks``: [content of a file], at stage 3 by rank."""

    def __init__(self, paths):
        self.of_ranks = [load_tensors(path) for path in paths]
        for path, content in zip(paths, self.of_ranks):
            wanted = {"module", "buffer_names", "param_shapes", "shared_params"}
            if not isinstance(content, dict) or not wanted <= content.keys():
                raise _C.FormatError(f"'{path}' is no file of a model under ZeRO: wanted {', '.join(sorted(wanted))}")
            if (ways := content.get("mp_world_size")) not in (None, 1):
                raise _tensor_parallel(path, f"mp_world_size {ways}")
        self.first = self.of_ranks[0]
        shapes = self.first["param_shapes"]
        self.shapes = [dict(group) for group in (shapes if isinstance(shapes, list) else [shapes])]

    def frozen(self):
        """[(name, shape, Stored)] of parameters that no optimizer updates."""
        trained = {name for group in self.shapes for name in group}
        known = trained | set(self.first["buffer_names"]) | set(self.first["shared_params"])
        shapes = self.first.get("frozen_param_shapes") or {}
        result = [(name, shape, self._frozen(name, shape)) for name, shape in shapes.items() if name not in trained]
        # Stage 1 does not list frozen parameters; at stage 3 those in "module" are empty.
        for name, value in self.first["module"].items():
            if name not in known and name not in shapes and (len(self.of_ranks) == 1 or value.numel()):
                result.append((name, value.shape, stored(value)))
        return result

    def _frozen(self, name, shape):
        fragments = [content["frozen_param_fragments"][name].detach() for content in self.of_ranks]
        numel = math.prod(shape)
        if sum(f.numel() for f in fragments) < numel:
            raise _C.FormatError(f"the parts of the frozen '{name}' have fewer elements than its shape {list(shape)}")
        if len(fragments) == 1 and fragments[0].numel() == numel:
            return stored(fragments[0])
        return Stored(fragments[0].dtype, lambda: torch.cat([f.flatten() for f in fragments])[:numel])

    def buffers(self):
        """[WholeTensor] of rank 0's buffers, and of other ranks' buffers that differ from these."""
        result = []
        for name in self.first["buffer_names"]:
            value = self.first["module"].get(name)
            if value is None:
                continue
            result.append(WholeTensor(name, value.shape, value.dtype, {VALUE: stored(value)}, "buffer"))
            for rank, content in enumerate(self.of_ranks[1:], 1):
                theirs = content["module"].get(name)
                if theirs is not None and not torch.equal(theirs, value):
                    result.append(WholeTensor(f"{rank}:{name}", theirs.shape, theirs.dtype, {VALUE: stored(theirs)},
                                              "rank buffer"))
        return result

    def aliases(self):
        """{name: [other names of the same parameter]}."""
        own = {name for group in self.shapes for name in group} | set(self.first.get("frozen_param_shapes") or {})
        result = {}
        for name, target in self.first["shared_params"].items():
            if name not in own:
                result.setdefault(target, []).append(name)
        return result
