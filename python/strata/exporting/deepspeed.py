"""Converts training checkpoints of Strata to checkpoints of DeepSpeed's ZeRO, so that DeepSpeed continues training."""

import os
import secrets
import shutil

from .. import _C
from ..importing.whole_tensors import find_own, read_own
from .deepspeed_files import Files


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
        with _C.AtomicFile(os.path.join(out, "latest")) as latest:
            os.write(latest.fileno(), whole.tag.encode())
            latest.publish()
    except OSError as error:
        raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error
    return path
