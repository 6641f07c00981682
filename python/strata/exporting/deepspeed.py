"""Converts training checkpoints of Strata to checkpoints of DeepSpeed's ZeRO, so that DeepSpeed continues training."""

import json
import logging
import math
import os
import secrets
import shutil

from .. import _C
from ..checkpoint.plain_values import from_plain
from ..importing.whole_tensors import VALUE, find_own, read_own
from .deepspeed_files import Files, Layout

logger = logging.getLogger("strata")


def export_deepspeed(checkpoint, out, tag=None, world_size=None, stage=None, sub_group_size=10**9):
    """Writes a training checkpoint as DeepSpeed 0.19 writes its own, for ``engine.load_checkpoint(out)`` there and for
    tools that read these files (``zero_to_fp32``, ``ds_to_universal``, Lightning's converter).

    The folder is complete or absent. About one tensor is in memory at a time; the disk of ``out`` needs room for twice
    the checkpoint during the call.

    Args:
        checkpoint: folder of Strata's checkpoints, or of one tag.
        out: folder for DeepSpeed's checkpoint, made if need be; the tag stays the same.
        tag: default: the one that ``latest`` names.
        world_size: ranks that DeepSpeed will train on; default: the number that saved. The files fit no other number.
        stage: of ZeRO that DeepSpeed will train with, 1 to 3; default: that of the checkpoint.

        sub_group_size: elements, as in the configuration of DeepSpeed's run; counts at stage 3.

    Returns:
        str, the path of the new checkpoint.

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
    files = Files(_Contents(whole, world_size, stage, sub_group_size))
    try:
        os.makedirs(out, exist_ok=True)
        partial = os.path.join(out, f".{whole.tag}.{secrets.token_hex(8)}.partial")
        try:
            os.mkdir(partial)
            files.write(partial)
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        with _C.AtomicFile(os.path.join(out, "latest")) as latest:
            os.write(latest.fileno(), whole.tag.encode())
            latest.publish()
    except OSError as error:
        raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error
    return path


class _Contents:
    """A checkpoint in the terms of DeepSpeed's files.

    Attributes:
        tensors: [``WholeTensor``]; ``trained``: those of ``layout``, by name.
        layout: ``Layout``.
        client_state, scheduler: the script's own values.
        param_groups: [dict] without parameters.
        scalars: {name: {key: number or tensor of one element}}, the optimizer's states of one element.
        config: dict, nested as a configuration is; ``training``: the rest of the checkpoint's JSON.
    """

    def __init__(self, whole, world_size, stage, sub_group_size):
        self.tensors, self.training, self.saved_world_size = whole.tensors, whole.training, whole.world_size
        stored = {t.name: t.kinds[VALUE] for t in whole.tensors if t.role == "client"}

        def read(name):
            return stored[name].read()

        optimizer = from_plain(whole.training.get("optimizer"), read)
        if optimizer is None:
            raise _C.FormatError("the checkpoint holds no states of an optimizer, which DeepSpeed needs to go on; "
                                 "`strata consolidate` writes its weights")
        self.config = _nested(whole.training.get("config", {}))
        self.client_state = from_plain(whole.training.get("client_state", {}), read)
        self.scheduler = from_plain((whole.training.get("scheduler") or {}).get("state"), read)
        self.param_groups = optimizer["param_groups"]
        by_name = {t.name: t for t in whole.tensors if t.role == "parameter"}
        groups = _groups(optimizer, by_name)
        self.layout = Layout(groups, world_size, stage, sub_group_size)
        self.trained = {name: by_name[name] for group in groups for name in group}
        self.scalars = self._scalars_of(optimizer)
        self._require_one_value_a_flat_tensor()

    def _scalars_of(self, optimizer):
        given = optimizer.get("scalars")
        if given is not None:
            return {name: given.get(name, {}) for name in self.trained}
        steps = self.training.get("optimizer_steps") or {}
        missed = steps.get("missed", {})
        return {name: {"step": int(steps.get("all", 0)) - int(missed.get(name, 0))} for name in self.trained}

    def _require_one_value_a_flat_tensor(self):
        for shapes in self.layout.shapes:
            first, *others = shapes
            for name in others:
                if repr(self.scalars[name]) != repr(self.scalars[first]):
                    logger.warning("DeepSpeed keeps one value for '%s' and '%s', of which the optimizer has %s and %s; "
                                   "the first is written", first, name, self.scalars[first], self.scalars[name])
                    break

    def number(self, section, key, default):
        """A number of the configuration; ``default`` where it is absent or "auto"."""
        values = self.config.get(section, {}) if section else self.config
        value = values.get(key)
        return value if isinstance(value, (int, float)) else default


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
        raise _C.FormatError("a param group of the checkpoint trains nothing, which DeepSpeed's files cannot "
                             "hold")
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
