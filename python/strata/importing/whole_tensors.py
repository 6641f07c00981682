"""A checkpoint as whole tensors that are read when somebody asks, and how it becomes one of Strata's."""

import json
import logging
import math
import os
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from .. import _C
from ..checkpoint.plain_values import to_plain

logger = logging.getLogger("strata")

VALUE = "value"


@dataclass
class Stored:
    """What a checkpoint holds of one tensor, of one kind."""

    dtype: torch.dtype
    read: Callable  # () -> tensor of as many elements as the whole one has, of this dtype, on the host


@dataclass
class WholeTensor:
    """A parameter, a buffer, or a value of the script's.

    Attributes:
        kinds: {kind: Stored}, ``VALUE`` first; others are what an optimizer keeps of each element.
        dtype: that the model has it in.
        role: as the core names roles: "parameter", "buffer", "rank buffer" ("<rank>:<name>"), "client".
    """

    name: str
    shape: list
    dtype: torch.dtype
    kinds: dict
    role: str = "parameter"
    trainable: bool = False
    aliases: list = field(default_factory=list)


@dataclass
class WholeCheckpoint:
    """``training`` is what ``strata.checkpoint.training`` keeps beside tensors."""

    tag: str
    tensors: list
    training: dict
    world_size: int = 1
    stage: int = 0


def stored(tensor):
    """Stored for a tensor that is there already."""
    tensor = tensor.detach()
    return Stored(tensor.dtype, lambda: tensor)


def write_checkpoint(checkpoint, folder):
    """Writes ``folder/<tag>`` as one of Strata's checkpoints, a tensor at a time, and lets ``latest`` name it.

    Returns:
        the path of the new checkpoint.

    Raises:
        UsageError: where something else than a checkpoint of Strata has that name.
    """
    path = os.path.join(folder, checkpoint.tag)
    if os.path.lexists(path) and _C.find_checkpoint(folder, checkpoint.tag) is None:
        raise _C.UsageError(f"'{path}' is there already, and is no checkpoint of Strata; give another folder to write "
                            "to")
    tensors = checkpoint.tensors
    listed = [(t.role, t.name, list(t.shape), t.dtype, t.trainable, t.aliases,
               [(k, s.dtype) for k, s in t.kinds.items()]) for t in tensors]  # fmt: skip
    pieces = sum(len(t.kinds) for t in tensors if math.prod(t.shape))
    with tqdm(total=pieces, desc="writing", unit="tensor", delay=1, disable=None) as progress:

        def read(tensor, kind):
            values = list(tensors[tensor].kinds.values())[kind].read()
            progress.update()
            return values

        _C.write_whole(folder, checkpoint.tag, listed, json.dumps(checkpoint.training), checkpoint.world_size,
                       checkpoint.stage, read)
    return path


def plain_values(values, tensors, where):
    """JSON for the dict ``values``, as far as checkpoints keep such values; what cannot be kept is told and left out.

    Args:
        tensors: {name: tensor}, to which those among the values are added.
    """
    kept = {}
    for key, value in values.items():
        try:
            found = ChainMap({}, tensors)  # names differ from those that are there
            kept[key] = to_plain(value, found, f"{where}.{key}")
            tensors.update(found.maps[0])
        except _C.UsageError as error:
            logger.warning("left out: %s", error)
    return to_plain({}, {}, where) if not kept else _with_any_keys(kept, where)


def _with_any_keys(kept, where):
    if all(isinstance(key, str) for key in kept) and "$" not in kept:
        return kept
    return {"$": "dict", "items": [[to_plain(key, {}, f"{where} key"), value] for key, value in kept.items()]}


def client_tensors(tensors):
    """[WholeTensor] for {name: tensor} of ``plain_values``."""
    return [WholeTensor(n, t.shape, t.dtype, {VALUE: stored(t.contiguous())}, "client") for n, t in tensors.items()]


def written_by(**others):
    """The versions of libraries that made a checkpoint."""
    from importlib import metadata

    try:
        version = metadata.version("strata-train")
    except metadata.PackageNotFoundError:
        version = "of a build folder"
    return {"strata": version, "torch": torch.__version__, **others}
