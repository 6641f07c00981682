"""A checkpoint as whole tensors, each read when it is needed, and the writer that makes it one of Strata's."""

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
    """One kind of one tensor in a checkpoint."""

    dtype: torch.dtype
    read: Callable  # () -> tensor with all elements of the whole one, of this dtype, on the host


@dataclass
class WholeTensor:
    """A parameter, a buffer, or a value of the script's.

    Attributes:
        kinds: {kind: Stored}, ``VALUE`` first; the others are an optimizer's states with one entry an element.
        dtype: its dtype in the model.
        role: the core's name of its role: "parameter", "buffer", "rank buffer" ("<rank>:<name>"), "client".
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
    """``training`` is the JSON that ``strata.checkpoint.training`` saves beside tensors."""

    tag: str
    tensors: list
    training: dict
    world_size: int = 1
    stage: int = 0


def stored(tensor):
    """Stored for a tensor in memory."""
    tensor = tensor.detach()
    return Stored(tensor.dtype, lambda: tensor)


def write_checkpoint(checkpoint, folder):
    """Writes ``folder/<tag>`` as one of Strata's checkpoints, a tensor at a time, and lets ``latest`` name it.

    Returns:
        the path of the new checkpoint.

    Raises:
        UsageError: a file or folder that is no checkpoint of Strata has that name.
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
    """JSON for the dict ``values``. Values that a checkpoint cannot hold are left out, with a warning.

    Args:
        tensors: {name: tensor}; the function adds the tensors among the values.
    """
    kept = {}
    for key, value in values.items():
        try:
            found = ChainMap({}, tensors)  # new names must differ from those in tensors
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
