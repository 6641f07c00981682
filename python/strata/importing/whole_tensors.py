"""A checkpoint as whole tensors, each read when it is needed, and the writer that makes it one of Strata's. Importers
share two readers: of Strata's own checkpoints, and of files of ``torch.save``, from which no code runs."""

import argparse
import collections
import errno
import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy
import torch
from tqdm import tqdm

from .. import _C
from ..checkpoint.plain_values import to_plain
from ..views import logger

VALUE = "value"


@dataclass
class Stored:
    """One kind of one tensor in a checkpoint."""

    dtype: torch.dtype
    read: Callable  # () -> tensor with all elements of the whole one, of this dtype, on the host


@dataclass
class WholeTensor:
    """A parameter, a buffer, or a value of the script's."""

    name: str
    shape: list
    dtype: torch.dtype  # in the model
    kinds: dict  # {kind: Stored}, ``VALUE`` first; the others are an optimizer's states with one entry an element
    role: str = "parameter"  # the core's name of it; or "buffer", "rank buffer" ("<rank>:<name>"), "client"
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


def number_of(value):
    """The number of a tensor of one element; any other value itself."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def stored(tensor):
    """Stored for a tensor in memory."""
    tensor = tensor.detach()
    return Stored(tensor.dtype, lambda: tensor)


def write_checkpoint(checkpoint, folder):
    """Writes ``folder/<tag>`` as one of Strata's checkpoints, a tensor at a time, and lets ``latest`` name it. Returns
    the path of the new checkpoint. UsageError where a file or folder that is no checkpoint of Strata has that name."""
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
    logger.info("imported %s", _summary(tensors))
    return path


def _summary(tensors):
    """"values of 7 parameters, exp_avg of 4, ..., 2 buffers", for a log."""
    parameters = [tensor for tensor in tensors if tensor.role == "parameter"]
    kinds = collections.Counter(kind for tensor in parameters for kind in tensor.kinds if kind != VALUE)
    states = "".join(f", {kind} of {count}" for kind, count in kinds.items())
    buffers = sum(tensor.role == "buffer" for tensor in tensors)
    return f"values of {len(parameters)} parameters{states or ', no states of an optimizer'}, {buffers} buffers"


def plain_values(values, tensors, where):
    """JSON for the dict ``values``. Values that a checkpoint cannot hold are left out, with a warning. The function
    adds the tensors among the values to ``tensors``, {name: tensor}."""
    kept = {}
    for key, value in values.items():
        try:
            to_plain(value, {}, f"{where}.{key}")
            kept[key] = value
        except _C.UsageError as error:
            logger.warning("left out: %s", error)
    return to_plain(kept, tensors, where)


def optimizer_steps(steps):
    """JSON of the parameters' counts of updates, from {name: int}."""
    most = max(steps.values(), default=0)
    return {"all": most, "missed": {name: most - count for name, count in steps.items() if count != most}}


def optimizer_values(of_class, groups, left_out, scalars, tensors):
    """JSON of an optimizer: its param groups but for the keys ``left_out``, and ``scalars``, {name: {key: number}}."""
    kept = [{k: v for k, v in group.items() if k not in left_out} for group in groups]
    return {"class": of_class,
            "param_groups": [plain_values(g, tensors, f"optimizer.param_groups[{i}]") for i, g in enumerate(kept)],
            "scalars": {name: plain_values(values, tensors, name) for name, values in scalars.items()}}


def client_tensors(tensors):
    """[WholeTensor] for {name: tensor} of ``plain_values``."""
    return [WholeTensor(n, t.shape, t.dtype, {VALUE: stored(t.contiguous())}, "client") for n, t in tensors.items()]


# --- checkpoints of ``engine.save_checkpoint``, read by one process without an engine ---


def find_own(folder, tag=None):
    """Path of a checkpoint of Strata; None: there is none. ``folder``: that of all tags, or of one tag; ``tag``:
    default: the one that ``latest`` names."""
    folder = os.path.abspath(folder)
    if tag is None and os.path.isfile(os.path.join(folder, "manifest.json")):
        folder, tag = os.path.split(folder)
    tag = _C.latest_tag(folder) if tag is None else str(tag)
    return None if tag is None else _C.find_checkpoint(folder, tag)


def read_own(path):
    """The WholeCheckpoint at ``path``. Its reads verify every block of a file that they touch, and make numbers of
    states in 8 bits. FormatError where it is damaged, IoError where a file is missing."""
    checkpoint = _C.TrainingCheckpoint(path)
    tensors = []
    for role, name, shape, dtype, trainable, aliases in checkpoint.tensors():
        dtypes = {VALUE: dtype}
        if role == "parameter":
            kinds = (kind for kind in checkpoint.kinds if not kind.endswith(".scales"))
            found = ((kind, checkpoint.dtype_of(name, kind)) for kind in kinds)
            dtypes.update((kind, own) for kind, own in found if own is not None)
        stored = {kind: Stored(own, partial(checkpoint.read, role, name, kind)) for kind, own in dtypes.items()}
        tensors.append(WholeTensor(name, shape, dtype, stored, role, trainable, aliases))
    return WholeCheckpoint(os.path.basename(path), tensors, json.loads(checkpoint.training), checkpoint.world_size,
                           checkpoint.stage)


# --- files of ``torch.save`` ---

# torch's restricted unpickler makes tensors and plain containers, and objects of the classes that are listed here: each
# stands for data, and its constructor does nothing else. Empty classes stand for DeepSpeed's own, so that DeepSpeed
# need not be installed. The unpickler refuses any other class; the error names it.

_DEEPSPEED_CLASSES = [(type(name.rpartition(".")[2], bases, {}), name) for name, bases in (
    ("deepspeed.runtime.zero.config.ZeroStageEnum", (int,)),  # the stage's number
    ("deepspeed.utils.tensor_fragment.fragment_address", ()),  # with numel and start
    ("deepspeed.runtime.fp16.loss_scaler.LossScaler", ()),  # with cur_scale and dynamic
    ("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", ()),  # with its state as attributes
)]  # fmt: skip


class OptimState8bit(torch.Tensor):
    """Stands for torchao's class of states in 8 bits: ``codes``, ``scale``, ``qmap``, ``signed``."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise _C.FormatError(f"a state of torchao in 8 bits is read as codes and scales; found a call of {function}")


_TORCHAO_CLASSES = [(OptimState8bit, f"torchao.{module}.subclass_8bit.OptimState8bit")
                    for module in ("optim", "prototype.low_bit_optim")]


def data_classes():
    """Context in which torch's restricted unpickler makes objects of the classes that stand for data."""
    return torch.serialization.safe_globals(_DEEPSPEED_CLASSES + _TORCHAO_CLASSES + _plain_classes())


def _plain_classes():
    """Classes of scripts' own values: namespaces of arguments, and numpy's numbers and arrays of numbers."""
    multiarray = numpy._core.multiarray if hasattr(numpy, "_core") else numpy.core.multiarray
    classes = [(argparse.Namespace, "argparse.Namespace")]
    classes += [(numpy.ndarray, "numpy.ndarray"), (numpy.dtype, "numpy.dtype")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        classes += [(multiarray.scalar, f"{module}.scalar"), (multiarray._reconstruct, f"{module}._reconstruct")]
    types = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return classes + [(t, f"numpy.dtypes.{t.__name__}") for t in types]


def load_tensors(path):
    """The value that ``torch.save`` wrote to ``path``. Tensors are mapped, so that the system reads only the bytes that
    are used. FormatError for a file that holds objects other than data (the message has their class), and for one that
    is cut off. IoError where it is not there."""
    try:
        with data_classes():
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if refused:
                raise _C.FormatError(f"'{path}' holds objects of {', '.join(sorted(refused)[:8])}, and is not read: "
                                     "making them could run code that is in the file. If you trust it and the class "
                                     "holds data alone, allow it with torch.serialization.add_safe_globals and call "
                                     "strata.importing from Python; or save again without it")
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looks for the file's end before its beginning
            raise _C.FormatError(f"'{path}' is cut off, or no file of torch.save") from error
        raise _C.IoError(f"cannot read '{path}': {error}") from error
    except pickle.UnpicklingError as error:
        raise _C.FormatError(f"'{path}' holds more than data, and is not read: "
                             f"{str(error).splitlines()[-1]}") from error
    except _C.Error:
        raise
    except Exception as error:  # torch raises RuntimeError, ValueError, EOFError and more for damaged files
        raise _C.FormatError(f"'{path}' is cut off, or no file of torch.save: {str(error).splitlines()[0]}") from error
