"""Finds the files of a checkpoint of DeepSpeed, and refuses checkpoints that Strata cannot read."""

import os
import re
from dataclasses import dataclass

from .. import _C

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OF_PARTS = (  # files of models that are cut by another kind of parallelism than ZeRO
    (re.compile(r"mp_rank_\d+_\d+_model_states\.pt|layer_\d+-model.*\.pt"), "pipeline parallelism"),
    (re.compile(r"expp_rank_\d+_.*|layer_\d+_expert_\d+_.*|expert_\d+_mp_rank_.*"), "expert parallelism"),
)
_LATEST = ("latest", "latest_universal")


@dataclass
class DeepSpeedFiles:
    """Paths of one checkpoint.

    Attributes:
        model: of rank 0, or of every rank at stage 3.
        optimizer: of every rank; empty where ``universal``.
        universal: the folder ``zero`` of a universal checkpoint, or None.
    """

    folder: str
    tag: str
    model: list
    optimizer: list
    universal: str | None


def is_deepspeed_checkpoint(folder):
    """bool: whether a folder of one tag holds files of DeepSpeed."""
    try:
        names = os.listdir(folder)
        return any(pattern.fullmatch(name) for pattern in (_OPTIMIZER, _SHARDED_MODEL, _MODEL) for name in names)
    except OSError:
        return False


def find_deepspeed_files(folder, tag=None):
    """The DeepSpeedFiles of a checkpoint.

    Args:
        folder: that of all tags, or of one tag.
        tag: default: the one that ``latest`` or ``latest_universal`` names.

    Raises:
        IoError: there is no such folder, or a file is missing.
        FormatError: it holds no checkpoint of DeepSpeed's ZeRO, or one that is cut by another kind of parallelism.
    """
    folder = os.path.normpath(os.fspath(folder))
    if not os.path.isdir(folder):
        raise _C.IoError(f"there is no folder '{folder}'")
    if tag is None and is_deepspeed_checkpoint(folder):
        folder, tag = os.path.split(os.path.abspath(folder))
    elif tag is None:
        tag = _latest(folder)
    if os.path.basename(tag) != tag or tag in (os.curdir, os.pardir):
        raise _C.FormatError(f"'{folder}': the tag '{tag}' is no name of a folder")
    path = os.path.join(folder, tag)
    if not os.path.isdir(path):
        raise _C.IoError(f"there is no folder '{path}'; give the tag of a checkpoint that is in '{folder}'")
    return _files_of(path, tag)


def _latest(folder):
    for name in _LATEST:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
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
    model = _by_rank(path, names, _SHARDED_MODEL)
    if not model:
        found = [(int(m[1]), name) for name in names if (m := _MODEL.fullmatch(name))]
        _refuse_tensor_parallel(path, found)
        model = [os.path.join(path, name) for _, name in found]
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
    found = [(int(m[1]), int(m[2]), name) for name in names if (m := pattern.fullmatch(name))]
    _refuse_tensor_parallel(path, [(mp, name) for _, mp, name in found])
    by_rank = {rank: name for rank, _, name in found}
    for rank in range(max(by_rank, default=-1) + 1):
        if rank not in by_rank:
            raise _C.IoError(f"'{path}': the file of rank {rank} is missing; there is '{found[0][2]}', and so on up to "
                             f"rank {max(by_rank)}")
    return [os.path.join(path, by_rank[rank]) for rank in sorted(by_rank)]


def _refuse_tensor_parallel(path, found):
    cut = [name for mp, name in found if mp > 0]
    if cut:
        raise _C.FormatError(f"'{path}' is of a model under tensor parallelism ('{cut[0]}'), which this version does "
                             "not import; make it whole in DeepSpeed first")
