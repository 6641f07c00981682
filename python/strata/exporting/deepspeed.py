"""Converts training checkpoints of Strata to checkpoints of DeepSpeed's ZeRO, so that DeepSpeed continues training.

The files are as version 0.19.8 writes them. This module has their contents, the offset of each element of the trained
parameters in the flat tensors of each rank, and pickles of DeepSpeed's classes."""

import collections
import functools
import json
import math
import os
import pickle
import secrets
import shutil
import types

import torch
from tqdm import tqdm

from .. import _C
from ..checkpoint.plain_values import from_plain
from ..importing.deepspeed_states import FlatLayout
from ..importing.whole_tensors import VALUE, find_own, number_of, read_own
from ..views import logger


def export_deepspeed(checkpoint, out, tag=None, world_size=None, stage=None, sub_group_size=10**9):
    """Writes a training checkpoint as DeepSpeed 0.19 writes its own, for ``engine.load_checkpoint(out)`` there and for
    tools that read these files (``zero_to_fp32``, ``ds_to_universal``, Lightning's converter).

    The folder is complete or absent. About one tensor is in memory at a time; the disk of ``out`` needs room for twice
    the checkpoint during the call. Returns the path of the new checkpoint.

    Args:
        checkpoint: folder of Strata's checkpoints, or of one tag.
        out: folder for DeepSpeed's checkpoint, made if need be; the tag stays the same.
        tag: default: the one that ``latest`` names.
        world_size: ranks that DeepSpeed will train on; default: the number that saved. The files fit no other number.
        stage: of ZeRO that DeepSpeed will train with, 1 to 3; default: that of the checkpoint.
        sub_group_size: elements, as in the configuration of DeepSpeed's run; counts at stage 3.

    Raises:
        UsageError: ``out`` has this tag already; ``stage`` or ``world_size`` is out of range.
        FormatError: the checkpoint is damaged, or holds no states of an optimizer, or holds values that DeepSpeed's
            files cannot have.
        IoError: a file is missing or cannot be written.
    """
    source = find_own(os.fspath(checkpoint), tag)
    if source is None:
        raise _C.IoError(f"there is no training checkpoint of Strata in '{os.fspath(checkpoint)}'"
                         + (f" with the tag '{tag}'" if tag is not None else ""))
    whole = read_own(source)
    if any(kind.endswith(".scales") for kind in _C.TrainingCheckpoint(source).kinds):
        logger.info("optimizer states in 8 bits are written as numbers: DeepSpeed's files have no place for codes")
    stage = whole.stage if stage is None else stage
    world_size = whole.world_size if world_size is None else world_size
    if stage not in (1, 2, 3):
        raise _C.UsageError(f"DeepSpeed's ZeRO has the stages 1, 2 and 3; the checkpoint was saved at stage {stage}: "
                            "name the stage that DeepSpeed will train with" if stage == 0 else
                            f"stage must be 1, 2 or 3; got {stage!r}")
    for what, value in (("number of ranks", world_size), ("sub_group_size", sub_group_size)):
        if value < 1:
            raise _C.UsageError(f"the {what} must be at least 1; got {value}")
    out = os.fspath(out)
    path = os.path.join(out, whole.tag)
    if os.path.lexists(path):
        raise _C.UsageError(f"'{path}' exists already; give another folder to write to")
    files = Files(whole, world_size, stage, sub_group_size)
    try:
        os.makedirs(out, exist_ok=True)
        partial = os.path.join(out, f".{whole.tag}.{secrets.token_hex(8)}.partial")
        try:
            os.mkdir(partial)
            files.write(partial)
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _C.write_file_atomically(os.path.join(out, "latest"), whole.tag)
    except OSError as error:
        raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error
    return path


# --- ``torch.save`` for values whose classes are DeepSpeed's ---

# DeepSpeed's files hold a few objects of its own classes. A pickle has only the module and the name of a class, so a
# process without the library can write such objects.


class ForeignObject:
    """An object of a class of another library. The reader of the file does not call the class's constructor, but sets
    ``attributes`` as the object's ``__dict__``."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def foreign_class(module, name):
    """A subclass of ``ForeignObject`` for a class that the reader of the file imports by these names."""
    return type(name, (ForeignObject,), {"__module__": module})


class _Pickler(pickle._Pickler):
    """The pickler of the standard library that is written in Python: its C twin refuses names that it cannot import."""

    def save_global(self, value, name=None):
        if isinstance(value, type) and issubclass(value, ForeignObject):
            self.write(pickle.GLOBAL + f"{value.__module__}\n{value.__name__}\n".encode())
            self.memoize(value)
        else:
            super().save_global(value, name)


_PICKLE = types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")


def save(value, path):
    """Writes ``value`` to the file ``path`` as ``torch.save`` does; parts of it may be ``ForeignObject``s."""
    torch.save(value, path, pickle_module=_PICKLE)


# --- offsets ---

# ``FlatLayout`` has them. At stages 1 and 2 each param group is one flat tensor, padded to a multiple of twice the
# number of ranks, and each rank has an equal range of it. At stage 3 a param group has several sub-groups where its
# part exceeds ``sub_group_size`` elements, and each sub-group is one flat tensor.


class Layout(FlatLayout):
    """The offsets of all trained parameters. ``groups``: [{name: shape}], by param group, in the optimizer's order,
    without parameters that have no elements. ``world_size``, ``stage`` and ``sub_group_size`` are of DeepSpeed's run;
    the last, elements of a rank, counts at stage 3. ``numel``: [elements of each flat tensor of one rank].
    ``group_flats``: [[flat tensors]] by param group. ``paddings``: [[elements at the end of each rank's flat tensor
    that belong to no parameter]] by rank, at stages 1 and 2."""

    def __init__(self, groups, world_size, stage, sub_group_size):
        self.world_size, self.stage = world_size, stage
        shapes, self.group_flats = [], []
        for group in groups:
            members = [group] if stage < 3 else self._sub_groups(group, sub_group_size)
            self.group_flats.append(list(range(len(shapes), len(shapes) + len(members))))
            shapes += members
        super().__init__(shapes, world_size, stage)
        alignment = 2 * world_size
        self.numel = [end if stage == 3 else math.ceil(end / alignment) * alignment // world_size for end in self.ends]
        self.paddings = [[min(max(numel * (rank + 1) - end, 0), numel) for numel, end in zip(self.numel, self.ends)]
                         for rank in range(world_size)]

    def _sub_groups(self, group, size):
        parts = {name: self.part(math.prod(shape)) for name, shape in group.items()}
        if size >= sum(parts.values()):
            return [group]
        result, members, held = [], {}, 0
        for name, shape in group.items():
            members[name] = shape
            held += parts[name]
            if held >= size:
                result.append(members)
                members, held = {}, 0
        return result + [members] if members else result

    def runs_of(self, name):
        """[``Run``] of a parameter, which together hold each of its elements once."""
        return self.runs_in(name, self.lengths(self.places[name][0]))

    def lengths(self, flat):
        """[elements of a flat tensor] by rank."""
        return [self.numel[flat]] * self.world_size

    @functools.cached_property
    def fragments(self):
        """[[{name: (numel, start)}] by flat tensor] by rank: the parameters' elements in the rank's flat tensors."""
        result = [[{} for _ in self.shapes] for _ in range(self.world_size)]
        for name in self.places:
            for run in self.runs_of(name):
                result[run.rank][run.flat][name] = (run.numel, run.at)
        return result


# --- the files ---

_VERSION = "0.19.8"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_fragment_address = foreign_class("deepspeed.utils.tensor_fragment", "fragment_address")


class Files:
    """Writes a ``WholeCheckpoint`` as these files.

    Flat tensors lie in temporary files while this class fills them, since parts of each tensor of the model go to many
    of them. ``world_size``, ``stage`` and ``sub_group_size`` are of DeepSpeed's run."""

    def __init__(self, whole, world_size, stage, sub_group_size):
        self._tensors, self._training, self._saved_world_size = whole.tensors, whole.training, whole.world_size
        stored = {t.name: t.kinds[VALUE] for t in whole.tensors if t.role == "client"}

        def read(name):
            return stored[name].read()

        optimizer = from_plain(whole.training.get("optimizer"), read)
        if optimizer is None:
            raise _C.FormatError("the checkpoint holds no states of an optimizer, which DeepSpeed needs to go on; "
                                 "`strata consolidate` writes its weights")
        self._config = _nested(whole.training.get("config", {}))
        self._is_half = self._config.get("fp16", {}).get("enabled") is True
        self._is_dynamic = self._is_half and not self._number("fp16", "loss_scale", 0)
        self._client_state = from_plain(whole.training.get("client_state", {}), read)
        self._scheduler = from_plain((whole.training.get("scheduler") or {}).get("state"), read)
        self._param_groups = optimizer["param_groups"]
        by_name = {t.name: t for t in whole.tensors if t.role == "parameter"}
        groups = [_in_order_of_muon(group) if settings.get("use_muon") else group
                  for settings, group in zip(self._param_groups, _groups(optimizer, by_name))]
        if stage == 3 and any(settings.get("use_muon") for settings in self._param_groups):
            logger.warning("DeepSpeed's Muon orders its matrices by shape, and so do these files; where zero.Init "
                           "builds the model, it cannot see shapes and would mix up matrices: build it without")
        self._layout = Layout(groups, world_size, stage, sub_group_size)
        self._of_muon = {flat for group, own in zip(self._param_groups, self._layout.group_flats)
                         if group.get("use_muon") for flat in own}
        self._trained = {name: by_name[name] for group in groups for name in group}
        self._scalars = self._scalars_of(optimizer)
        self._require_one_value_a_flat_tensor()

    def _scalars_of(self, optimizer):
        given = optimizer.get("scalars")
        if given is not None:
            return {name: given.get(name, {}) for name in self._trained}
        steps = self._training.get("optimizer_steps") or {}
        missed = steps.get("missed", {})
        return {name: {"step": int(steps.get("all", 0)) - int(missed.get(name, 0))} for name in self._trained}

    def _require_one_value_a_flat_tensor(self):
        scalars = self._scalars
        for first, *others in self._layout.shapes:
            name = next((name for name in others if repr(scalars[name]) != repr(scalars[first])), None)
            if name is not None:
                logger.warning("DeepSpeed keeps one value for '%s' and '%s', of which the optimizer has %s and %s; the "
                               "first is written", first, name, scalars[first], scalars[name])

    def _number(self, section, key, default):
        """A number of the configuration; ``default`` where it is absent or "auto"."""
        values = self._config.get(section, {}) if section else self._config
        value = values.get(key)
        return value if isinstance(value, (int, float)) else default

    def write(self, folder):
        """Writes all files into ``folder``, which exists and is empty."""
        work = os.path.join(folder, "work")
        os.mkdir(work)
        flats = self._flats(work)
        module, frozen = self._fill(flats, work)
        self._write_model(folder, module, frozen)
        bf16 = self._is_bf16()
        for rank in range(self._layout.world_size):
            name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            save({"optimizer_state_dict": self._optimizer(flats, rank), "ds_config": self._config,
                  "ds_version": _VERSION}, os.path.join(folder, name))
        del flats, module, frozen
        shutil.rmtree(work)

    # --- tensors ---

    def _flats(self, work):
        """{kind: [[tensor on disk, by flat tensor] by rank]}, filled with zeros."""
        kinds = {}
        for tensor in self._trained.values():
            kinds.update((kind, stored.dtype) for kind, stored in tensor.kinds.items())
        kinds[VALUE] = torch.float32
        return {kind: [[_on_disk(os.path.join(work, f"{i}-{rank}-{flat}"), self._numel_of(kind, rank, flat), dtype)
                        for flat in range(len(self._layout.numel))] for rank in range(self._layout.world_size)]
                for i, (kind, dtype) in enumerate(kinds.items())}

    def _numel_of(self, kind, rank, flat):
        if not self._is_whole(kind, flat):
            return self._layout.numel[flat]
        return self._layout.whole_parts(flat, self._layout.lengths(flat))[1][rank]

    def _is_whole(self, kind, flat):
        """Whether DeepSpeed keeps a state of each parameter whole on every rank that has a part of it: Muon's momentum,
        at stages 1 and 2, where states are not offloaded and its class for bf16 at stage 1 does not train."""
        accumulated = self._config.get("data_types", {}).get("grad_accum_dtype")
        of_bf16 = self._layout.stage == 1 and self._is_bf16() and accumulated in ("fp32", "float32", "float")
        offload = self._config.get("zero_optimization", {}).get("offload_optimizer")
        is_away = isinstance(offload, dict) and offload.get("device", "none") != "none"
        is_momentum = kind == "momentum_buffer" and flat in self._of_muon
        return is_momentum and self._layout.stage < 3 and not of_bf16 and not is_away

    def _is_bf16(self):
        return any(self._config.get(name, {}).get("enabled") is True for name in ("bf16", "bfloat16"))

    def _fill(self, flats, work):
        """({name: tensor of the module's state dict}, {name: frozen tensor}), after it has filled ``flats``."""
        module, frozen = {}, {}
        whole_module = self._layout.stage < 3
        tensors = [t for t in self._tensors if t.role == "parameter"]
        for number, tensor in enumerate(tqdm(tensors, desc="reading", unit="tensor", delay=1, disable=None)):
            trained = tensor.name in self._trained
            value = tensor.kinds[VALUE].read().reshape(tensor.shape)
            for kind, stored in tensor.kinds.items() if trained else ():
                elements = (value if kind == VALUE else stored.read()).flatten()
                for run in self._layout.runs_of(tensor.name):
                    target = flats[kind][run.rank][run.flat]
                    if self._is_whole(kind, run.flat):
                        offsets, _ = self._layout.whole_parts(run.flat, self._layout.lengths(run.flat))
                        begin = offsets[run.rank][tensor.name]
                        target[begin:begin + len(elements)].copy_(elements)
                    else:
                        target[run.at:run.at + run.numel].copy_(elements[run.begin:run.begin + run.numel])
            if whole_module or not trained:
                kept = _on_disk(os.path.join(work, f"module-{number}"), value.numel(), tensor.dtype).view(tensor.shape)
                kept.copy_(value)
                if not trained:
                    frozen[tensor.name] = kept
                if whole_module:
                    module.update(dict.fromkeys([tensor.name, *tensor.aliases], kept))
            if not whole_module:
                module.update((name, torch.empty(0, dtype=tensor.dtype)) for name in (tensor.name, *tensor.aliases))
        return module, frozen

    # --- the model's files ---

    def _write_model(self, folder, module, frozen):
        of_ranks = self._layout.stage == 3
        for rank in range(self._layout.world_size if of_ranks else 1):
            fragments = {name: self._fragment(value, rank) if of_ranks else value for name, value in frozen.items()}
            name = f"{f'zero_pp_rank_{rank}_' if of_ranks else ''}mp_rank_00_model_states.pt"
            save(self._model(rank, module, frozen, fragments), os.path.join(folder, name))

    def _fragment(self, value, rank):
        """The rank's part of a frozen parameter; all ranks' parts have the same size."""
        part = math.ceil(value.numel() / self._layout.world_size)
        own = value.flatten()[rank * part:(rank + 1) * part]
        return torch.nn.functional.pad(own, (0, part - own.numel()))

    def _model(self, rank, module, frozen, fragments):
        layout = self._layout
        buffers = self._buffers(rank)
        ordered = collections.OrderedDict
        listed = layout.stage > 1  # stage 1 does not list frozen parameters apart
        shared = {alias: t.name for t in self._tensors if t.role == "parameter" for alias in t.aliases}
        steps = int(self._training.get("global_steps") or 0)
        return {"module": ordered({**module, **buffers}), "buffer_names": list(buffers), "optimizer": None,
                "param_shapes": [ordered((n, torch.Size(s)) for n, s in shapes.items()) for shapes in layout.shapes],
                "frozen_param_shapes": ordered((n, v.shape) for n, v in frozen.items()) if listed else None,
                "shared_params": shared if rank == 0 else {},
                "frozen_param_fragments": ordered(fragments) if listed else None,
                "lr_scheduler": self._scheduler, "data_sampler": None, "random_ltd": None,
                "skipped_steps": int(self._training.get("skipped_steps") or 0), "global_steps": steps,
                "global_samples": steps * self._number("", "train_batch_size", 0), "dp_world_size": layout.world_size,
                "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
                "ds_config": self._config, "ds_version": _VERSION, **self._client_state}

    def _buffers(self, rank):
        """{name: tensor}: rank 0's, or the rank's own where the same number of ranks saved it."""
        buffers = {t.name: t for t in self._tensors if t.role == "buffer"}
        if self._saved_world_size == self._layout.world_size:
            prefix = f"{rank}:"
            buffers.update((t.name.removeprefix(prefix), t) for t in self._tensors
                           if t.role == "rank buffer" and t.name.startswith(prefix))
        return {name: t.kinds[VALUE].read().reshape(t.shape).clone() for name, t in buffers.items()}

    # --- the optimizer's files ---

    def _optimizer(self, flats, rank):
        layout = self._layout
        masters = flats[VALUE][rank]
        scaler = self._loss_scaler()
        state = {"loss_scaler": scaler, "dynamic_loss_scale": self._is_dynamic, "overflow": False}
        if layout.stage == 3:
            return {**state, "zero_stage": 3, "partition_count": layout.world_size,
                    "optimizer_state_dict": self._torch_state(flats, rank), "fp32_flat_groups": masters}  # fmt: skip
        return {**state, "clip_grad": self._number("", "gradient_clipping", 0.0),
                "base_optimizer_state": self._torch_state(flats, rank), "single_partition_of_fp32_groups": masters,
                "zero_stage": layout.stage, "group_paddings": layout.paddings[rank],
                "param_alignment_paddings": [[0] * len(shapes) for shapes in layout.shapes],
                "partition_count": [layout.world_size] * len(layout.shapes), "ds_version": _VERSION,
                "param_slice_mappings": [collections.OrderedDict((name, _fragment_address(numel=numel, start=start))
                                                                 for name, (numel, start) in fragments.items())
                                         for fragments in layout.fragments[rank]]}

    def _torch_state(self, flats, rank):
        """The result of ``state_dict()`` of the optimizer of ``rank``."""
        layout = self._layout
        state = {}
        for flat, shapes in enumerate(layout.shapes):
            first = next(iter(shapes))
            kinds = self._trained[first].kinds
            values = dict(self._scalars[first])  # torch's optimizers accept a step that is an int, too
            if flat in self._of_muon:
                values.pop("step", None)  # which it does not count
            elif self._of_muon and "step" in values:  # any class may update the other half: torch's needs a tensor
                values["step"] = torch.tensor(int(values["step"]))
            values.update((kind, flats[kind][rank][flat]) for kind in kinds if kind != VALUE)
            if len(values) > 1 or "step" not in values:
                state[flat] = values
        groups = []
        for group, own in zip(self._param_groups, layout.group_flats):
            made = group.get("nesterov", True), group.get("adjust_lr_fn") or "original"
            if group.get("use_muon") and made != (True, "original"):
                logger.warning("DeepSpeed's Muon has nesterov=True and the \"original\" factor; the checkpoint has "
                               "nesterov=%s, adjust_lr_fn=%s", *made)
            groups.append({**group, "params": own})
            step = number_of(state.get(own[0], {}).get("step"))
            if isinstance(step, int):
                groups[-1]["step"] = step  # FusedAdam of older versions counts here
        return {"state": state, "param_groups": groups}

    def _loss_scaler(self):
        scale = float(self._training.get("loss_scale") or 1.0)
        if not self._is_dynamic:
            return foreign_class(_SCALERS, "LossScaler")(cur_scale=scale if self._is_half else 1.0, dynamic=False)
        saved = self._training.get("loss_scaler") or {}
        hysteresis = int(self._number("fp16", "hysteresis", 2))
        return foreign_class(_SCALERS, "DynamicLossScaler")(
            cur_scale=scale, dynamic=True, cur_iter=int(saved.get("iteration", 0)),
            last_overflow_iter=int(saved.get("last_overflow", -1)), scale_factor=2.0,
            scale_window=int(self._number("fp16", "loss_scale_window", 1000)),
            min_scale=self._number("fp16", "min_loss_scale", 1), delayed_shift=hysteresis,
            cur_hysteresis=int(saved.get("hysteresis_left", hysteresis)),
            consecutive_hysteresis=self._config.get("fp16", {}).get("consecutive_hysteresis") is True,
            raise_error_at_min_scale=True, dtype=torch.half)


def _in_order_of_muon(group):
    """{name: shape} as DeepSpeed's class for Muon orders it: the largest first dimension first, then the next."""
    return dict(sorted(group.items(), key=lambda entry: list(entry[1]), reverse=True))


def _groups(optimizer, by_name):
    """[{name: shape}] of the parameters that the optimizer trains, by param group."""
    members = optimizer.get("members")
    trained = [t.name for t in by_name.values() if t.trainable and VALUE in t.kinds]
    if members is None and len(optimizer["param_groups"]) == 1:
        members = [trained]
    if members is None:
        raise _C.FormatError("the checkpoint does not say which parameters each of its "
                             f"{len(optimizer['param_groups'])} param groups has: an older version saved it; load "
                             "it and save it again")
    unknown = [name for names in members for name in names if name not in by_name]
    if unknown or sorted(name for names in members for name in names if by_name[name].trainable) != sorted(trained):
        raise _C.FormatError("the param groups of the checkpoint do not have its trained parameters"
                             + (f"; first: '{unknown[0]}'" if unknown else ""))
    groups = [{name: by_name[name].shape for name in names
               if by_name[name].trainable and math.prod(by_name[name].shape)} for names in members]
    if not all(groups):
        raise _C.FormatError("a param group of the checkpoint trains nothing, which DeepSpeed's files cannot hold")
    return groups


def _nested(flat):
    """The nested configuration from {"a.b": JSON}."""
    result = {}
    for path, text in flat.items():
        *sections, key = path.split(".")
        at = result
        for section in sections:
            at = at.setdefault(section, {})
        try:
            at[key] = json.loads(text)
        except ValueError:
            at[key] = text
    return result


def _on_disk(path, numel, dtype):
    """A tensor of zeros whose memory is a file, so that the system may write its pages to disk."""
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    with open(path, "wb") as file:
        file.truncate(numel * dtype.itemsize)
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
