"""Converts folders of torch.distributed.checkpoint, as users of FSDP2 write them, to checkpoints of Strata.

Such a folder holds ``{"model": ..., "optimizer": ...}`` of ``get_state_dict``, which may be inside another dict, or a
model's state dict alone. Other entries are the script's values.

``.metadata``, which lists the offsets of tensors in files, is a pickle. The unpickler here knows a handful of names,
each of which stands for data. In place of torch's own classes it has empty ones, new for each file, so that reading
neither calls nor changes any code of torch. The data files hold a ``torch.save`` for each piece; torch's restricted
unpickler reads these."""

import io
import math
import os
import pickle

import torch

from .. import _C
from ..checkpoint.library_states import NESTED, Numbers, as_numbers, engine_states
from ..checkpoint.plain_values import written_by
from .whole_tensors import (VALUE, Stored, WholeCheckpoint, WholeTensor, client_tensors, data_classes, number_of,
                            optimizer_steps, optimizer_values, plain_values, write_checkpoint)

_MODELS, _OPTIMIZERS = ("model", "module"), ("optimizer", "optim")
_SCHEDULERS = ("lr_scheduler", "scheduler")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's own modules


def import_dcp(folder, out, tag=None, buffers=()):
    """Writes the contents of a folder of torch.distributed.checkpoint as a checkpoint of Strata. About one tensor is in
    memory at a time, beside the chunk of it that is being read. Returns the path of the new checkpoint. FormatError
    where the folder is damaged, holds objects other than data, or holds no model. IoError where a file is missing.

    Args:
        folder: the folder that ``dcp.save`` wrote.
        out: folder of Strata's checkpoints, made if need be.
        tag: of the new checkpoint; default: the folder's name.
        buffers: names of the model's buffers, since the folder does not distinguish them from frozen parameters.
            Tensors of other than floating dtypes, and batch norm's, count as buffers without being named.
    """
    return write_checkpoint(read_dcp(folder, tag, buffers), os.fspath(out))


def read_dcp(folder, tag=None, buffers=()):
    """The WholeCheckpoint in a folder; arguments and errors as of ``import_dcp``."""
    files = DcpFolder(folder)
    tag = os.path.basename(os.path.abspath(folder)) if tag is None else tag
    model, optimizer, others = _sorted(files)
    if not model or not all(files.is_tensor(key) for key in model.values()):
        found = sorted(_name(path) for path in files.paths.values())
        raise _C.FormatError(f"'{folder}' holds no model: wanted tensors under 'model', or a state dict of tensors; "
                             f"found {', '.join(found[:5])}")
    states, groups = _optimizer_of(files, optimizer)
    listed = [name for group in groups or [] for name in group.get("params", [])]
    trained = set(states) | {name for name in listed if isinstance(name, str)}
    unknown = sorted(str(name) for name in states.keys() - model.keys())
    if unknown:
        raise _C.FormatError(f"'{folder}' has states of an optimizer for '{unknown[0]}', which is none of the model's "
                             f"tensors, and they are not imported; save what get_state_dict(model, optimizer) returns, "
                             f"which has the model's names; found {len(unknown)} such")
    group_of = {name: group for group in groups or [] for name in group.get("params", []) if isinstance(name, str)}
    aliases = _tied(files, model, trained)
    tensors, steps = [], {}
    for name, key in model.items():
        if any(name in others for others in aliases.values()):
            continue
        stored, shape = files.stored(key), files.shape_of(key)
        known = name in buffers or name.rpartition(".")[2] in _BUFFERS or not stored.dtype.is_floating_point
        if known and name not in trained:
            tensors.append(WholeTensor(name, shape, stored.dtype, {VALUE: stored}, "buffer"))
            continue
        kinds, scalars = {VALUE: stored}, {}
        saved = {kind: _Saved(files, key) if files.is_tensor(key) else files.value(key)
                 for kind, key in states.get(name, {}).items()}
        for kind, state in engine_states(saved, group_of.get(name, {}), f"'{name}'").items():
            if isinstance(state, Numbers) and state.numel() != math.prod(shape):
                raise _C.FormatError(f"'{folder}': the state '{kind}' of '{name}' has {state.numel()} codes; wanted "
                                     f"{math.prod(shape)} of shape {shape}: save it from one rank, or in 32 bits")
            if isinstance(state, Numbers) or isinstance(state, _Saved) and state.shape == shape and kind != "step":
                kinds[kind] = Stored(state.dtype, state.read)
            else:
                scalars[kind] = number_of(state.read() if isinstance(state, _Saved) else state)
        steps[name] = scalars
        tensors.append(WholeTensor(name, shape, stored.dtype, kinds, trainable=name in trained or not states,
                                   aliases=aliases.get(name, [])))
    beside = {}
    training = _training_of(files, others, groups, {n: s for n, s in steps.items() if n in trained}, beside)
    return WholeCheckpoint(tag, tensors + client_tensors(beside), training)


class _Saved:
    """A tensor of an optimizer's state in a folder."""

    def __init__(self, files, key):
        found = files.stored(key)
        self.shape, self.dtype, self.read = files.shape_of(key), found.dtype, found.read

    def numel(self):
        return math.prod(self.shape)


def _sorted(files):
    """({name: key} of the model, {path: key} of the optimizer, {path: key} of the rest)."""
    paths = {tuple(path): key for key, path in files.paths.items()}
    while len({path[0] for path in paths}) == 1 and min(map(len, paths)) > 1 and next(iter(paths))[0] not in _MODELS:
        paths = {path[1:]: key for path, key in paths.items()}  # {"app": {"model": ...}}
    tops = {path[0] for path in paths}
    top = next((name for name in _MODELS if name in tops), None)
    if top is None:
        return {_name(path): key for path, key in paths.items()}, {}, {}
    model = {_name(path[1:]): key for path, key in paths.items() if path[0] == top and len(path) > 1}
    optimizer = {path[1:]: key for path, key in paths.items() if path[0] in _OPTIMIZERS}
    return model, optimizer, {p: k for p, k in paths.items() if p[0] != top and p[0] not in _OPTIMIZERS}


def _name(path):
    return ".".join(map(str, path))


def _optimizer_of(files, optimizer):
    """({parameter: {name of the state: key}}, param groups or None)."""
    states, groups, flat = {}, None, {}
    for path, key in optimizer.items():
        if path[0] == "state" and len(path) > 2:  # bitsandbytes has a dict more
            states.setdefault(path[1], {})[path[-1]] = key
        elif path == ("param_groups",):
            groups = files.value(key)
        elif path[0] == "param_groups" and len(path) > 2:
            flat.setdefault(path[1], {})[_name(path[2:])] = files.value(key)
        elif len(path) == 1 and str(path[0]).startswith("state."):  # flattened by get_state_dict
            name, _, kind = path[0].removeprefix("state.").rpartition(".")
            states.setdefault(name.removesuffix(f".{NESTED}"), {})[kind] = key
    if groups is None and flat:
        groups = [flat[index] for index in sorted(flat)]
    return states, groups if isinstance(groups, list) else None


def _tied(files, model, trained):
    """{name: [other names]}: trained matrices, and the names of untrained ones that are the same matrix."""
    if not trained:
        return {}
    shapes = {}
    for name in trained & model.keys():
        shape = files.shape_of(model[name])
        if len(shape) > 1:
            shapes.setdefault(tuple(shape), []).append(name)
    result = {}
    for name in model.keys() - trained:
        for other in shapes.get(tuple(files.shape_of(model[name])), []):
            one, two = files.stored(model[name]), files.stored(model[other])
            if one.dtype == two.dtype and torch.equal(one.read(), two.read()):
                result.setdefault(other, []).append(name)
                break
    return result


def _training_of(files, others, groups, scalars, beside):
    counts = optimizer_steps({name: int(values.get("step", 0)) for name, values in scalars.items()})
    most = counts["all"]
    values, scheduler = {}, None
    for path, key in others.items():
        at = values
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = files.value(key)
    name = next((name for name in _SCHEDULERS if isinstance(values.get(name), dict)), None)
    if name is not None:
        scheduler = {"class": None, "state": plain_values(values.pop(name), beside, "scheduler")}
    left_out = ("params", "param_names")
    optimizer = None if groups is None else optimizer_values(None, groups, left_out, scalars, beside)
    return {"client_state": plain_values(values, beside, "client_state"), "scheduler": scheduler,
            "optimizer": optimizer, "config": {}, "written_by": written_by(), "without_frozen": False,
            "global_steps": most, "micro_steps": most, "skipped_steps": 0, "loss_scale": 1.0, "optimizer_steps": counts}


# --- the folder ---

_NAME = ".metadata"


class _Record:
    """An object that a pickle describes, as its attributes."""

    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _stand_ins():
    """{(module, name): the object that stands for it}."""
    metadata, filesystem = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    records = [(metadata, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta")] + [(filesystem, "_StorageInfo"), (filesystem, "_StoragePrefix")]  # fmt: skip
    found = {key: type(key[1], (_Record,), {}) for key in records}
    found |= {("torch", "Size"): type("Size", (tuple,), {}),
              ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
              (metadata, "_MEM_FORMAT_ENCODING"): lambda value: value,
              ("torch.serialization", "_get_layout"): lambda name: name}
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            found[module, name] = lambda *parts: "/".join(map(str, parts))
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, path):
        super().__init__(file)
        self._path = path
        self._known = _stand_ins()

    def find_class(self, module, name):
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _C.FormatError(f"'{self._path}' holds an object of {module}.{name}, and is not read: making it could run "
                             "code that is in the file")

    def persistent_load(self, pid):
        raise _C.FormatError(f"'{self._path}' refers to objects outside of itself, which torch does not write there")


class DcpFolder:
    """An open folder. ``paths``: {key: path in the saved state dict, a tuple of keys and indices}."""

    def __init__(self, folder):
        self._folder = os.fspath(folder)
        path = os.path.join(self._folder, _NAME)
        if not os.path.isfile(path):
            raise _C.IoError(f"'{self._folder}' is no folder of torch.distributed.checkpoint: wanted a file '{_NAME}' "
                             "there")
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file, path).load()
            self._entries = dict(metadata.state_dict_metadata)
            planned = getattr(metadata, "planner_data", None) or {}
            self.paths = {key: tuple(planned.get(key, (key,))) for key in self._entries}
            self._pieces = {}  # by key and offset
            for index, info in metadata.storage_data.items():
                offset = getattr(index, "offset", None)
                self._pieces.setdefault(index.fqn, {})[None if offset is None else tuple(offset)] = info
        except _C.Error:
            raise
        except Exception as error:  # a damaged pickle can raise any class
            raise _C.FormatError(f"'{path}' is cut off, or not as torch writes it: {error!r}") from error

    def is_tensor(self, key):
        """Whether the value of ``key`` is a tensor; else it is any value that torch.save writes."""
        return hasattr(self._entries[key], "chunks")

    def shape_of(self, key):
        """[int] of a tensor."""
        return [int(n) for n in self._entries[key].size]

    def stored(self, key):
        """Stored for a tensor; its ``read`` joins the pieces. FormatError where the pieces do not cover a tensor of its
        shape, or overlap."""
        entry = self._entries[key]
        shape, dtype = self.shape_of(key), entry.properties.state[0]
        pieces = []
        for chunk in entry.chunks:
            begin, sizes = [int(n) for n in chunk.offsets], [int(n) for n in chunk.sizes]
            info = self._pieces.get(key, {}).get(tuple(begin), self._pieces.get(key, {}).get(None))
            fits = len(begin) == len(sizes) == len(shape) and all(
                b >= 0 and n >= 0 and b + n <= most for b, n, most in zip(begin, sizes, shape))
            if info is None or not fits:
                raise _C.FormatError(f"'{self._folder}': a piece of '{key}' has no place in a file or in its shape "
                                     f"{shape}")
            pieces.append((begin, sizes, info))
        overlap = _overlap([(begin, sizes) for begin, sizes, _ in pieces])
        if overlap is not None:
            raise _C.FormatError(f"'{self._folder}': pieces of '{key}', whose shape is {shape}, overlap: found "
                                 f"{overlap[0]} and {overlap[1]} as (offsets, sizes); save the folder again")
        if sum(math.prod(sizes) for _, sizes, _ in pieces) != math.prod(shape):  # no overlaps, so a piece is missing
            raise _C.FormatError(f"'{self._folder}': the pieces of '{key}' do not make up its shape {shape}")
        return Stored(dtype, lambda: self._assembled(key, shape, dtype, pieces))

    def _assembled(self, key, shape, dtype, pieces):
        whole = torch.empty(shape, dtype=dtype)
        for begin, sizes, info in pieces:
            piece = as_numbers(self._load(key, info), key)
            if not isinstance(piece, torch.Tensor) or list(piece.shape) != sizes or piece.dtype != dtype:
                raise _C.FormatError(f"'{self._folder}': the piece of '{key}' in '{info.relative_path}' at "
                                     f"{info.offset} is no tensor of shape {sizes} and {dtype}")
            whole[tuple(slice(first, first + size) for first, size in zip(begin, sizes))].copy_(piece.detach())
        return whole

    def value(self, key):
        """The value that was saved under ``key``, tensor or not."""
        if self.is_tensor(key):
            return self.stored(key).read()
        return self._load(key, next(iter(self._pieces[key].values())))

    def _load(self, key, info):
        name = info.relative_path
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir):
            raise _C.FormatError(f"'{self._folder}': '{key}' lies outside of the folder, in '{name}'")
        if getattr(info, "transform_descriptors", None):
            raise _C.FormatError(f"'{self._folder}': '{key}' was written through {list(info.transform_descriptors)}, "
                                 "which this version does not read; save without")
        path = os.path.join(self._folder, name)
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
        except OSError as error:
            raise _C.IoError(f"cannot read '{path}': {error}") from error
        if len(content) != info.length:
            raise _C.FormatError(f"'{path}' is cut off: '{key}' has {info.length} bytes at {info.offset}; found "
                                 f"{len(content)}")
        try:
            with data_classes():
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise _C.FormatError(f"'{path}': '{key}' at {info.offset} is damaged, or holds more than data: "
                                 f"{str(error).splitlines()[0]}") from error


def _overlap(boxes):
    """The first two of ``boxes``, [(offsets, sizes)], that have an element in common; None where no two have.

    The function sweeps along the first dimension, and compares a box with those that have begun and not ended. Pieces
    that are cut along this dimension have none to compare with, so thousands of ranks cost only a sort."""
    under_way = []
    for box in sorted(box for box in boxes if math.prod(box[1]) > 0):
        begin = box[0][0] if box[0] else 0  # a tensor of no dimension has one element
        under_way = [other for other in under_way if not other[0] or other[0][0] + other[1][0] > begin]
        for other in under_way:
            if all(max(b, o) < min(b + n, o + m) for b, n, o, m in zip(*box, *other)):
                return other, box
        under_way.append(box)
    return None
