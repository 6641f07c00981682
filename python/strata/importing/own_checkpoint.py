"""Checkpoints of ``engine.save_checkpoint``, read by one process without an engine."""

import json
import os

from .. import _C
from .whole_tensors import VALUE, Stored, WholeCheckpoint, WholeTensor


def find_own(folder, tag=None):
    """Path of a checkpoint of Strata; None: there is none.

    Args:
        folder: that of all tags, or of one tag.
        tag: default: the one that ``latest`` names.
    """
    folder = os.path.abspath(folder)
    if tag is None and os.path.isfile(os.path.join(folder, "manifest.json")):
        folder, tag = os.path.split(folder)
    tag = _C.latest_tag(folder) if tag is None else str(tag)
    return None if tag is None else _C.find_checkpoint(folder, tag)


def read_own(path):
    """The WholeCheckpoint at ``path``. Its reads verify every block of a file that they touch.

    Raises:
        FormatError: it is damaged.
        IoError: a file is missing.
    """
    checkpoint = _C.TrainingCheckpoint(path)
    tensors = []
    for role, name, shape, dtype, trainable, aliases in checkpoint.tensors():
        kinds = checkpoint.kinds if role == "parameter" else [VALUE]
        stored = {kind: _stored(checkpoint, role, name, kind, dtype) for kind in kinds
                  if kind == VALUE or checkpoint.has(name, kind)}
        tensors.append(WholeTensor(name, shape, dtype, stored, role, trainable, aliases))
    return WholeCheckpoint(os.path.basename(path), tensors, json.loads(checkpoint.training), checkpoint.world_size,
                           checkpoint.stage)


def _stored(checkpoint, role, name, kind, dtype):
    found = checkpoint.dtype_of(name, kind) if role == "parameter" else dtype
    return Stored(found or dtype, lambda: checkpoint.read(role, name, kind))
