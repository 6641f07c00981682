"""Plans the reads that fill a model from a checkpoint, and builds models that have no memory before they are filled.

A plan needs only headers, so that a checkpoint that does not fit is refused before any value is stored. A transformers
model is built with parameters that have no memory and with real buffers."""

import math
import os
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import _C
from ..views import logger
from .names import model_tensors, state_names
from .repeated_blocks import Leaves
from .supported_transformers import adapter, build


class CheckpointFiles(NamedTuple):
    """An open checkpoint: the path as it was given, a _C.Checkpoint, and the ``Leaves`` of its tensors."""

    path: str
    checkpoint: object
    leaves: Leaves


def open_files(path):
    """The ``CheckpointFiles`` of a folder, or of one .safetensors file."""
    checkpoint = _C.Checkpoint(os.fspath(path))
    return CheckpointFiles(path, checkpoint, Leaves(checkpoint.tensors()))


class LoadPlan:
    """The ranges of a checkpoint's tensors that fill an engine's parameters. Methods are local unless they say
    "collective". FormatError where tensors are missing, have another shape or an unfit dtype, or with ``strict`` are
    unexpected; it lists them.

    Args:
        model: the module, for its naming rules.
        files: ``CheckpointFiles``.
        parameters: [(index among the model's parameters, [names], full shape, torch dtype of the weight)].
        buffers: {name: ``BufferHome``} of persistent buffers.
        strict: tensors that the model does not use are an error; else a warning.
        constructed: {index: value} of parameters that the model's class leaves out of its checkpoints.
        found: a result of ``model_tensors`` for these parameters, and maybe for others.
    """

    def __init__(self, model, files, parameters, buffers, strict=False, constructed=None, found=None):
        self._path, self._checkpoint, leaves = files
        known = {name for _, names, _, _ in parameters for name in names} | set(buffers)
        found, self.unexpected = (found, []) if found else model_tensors(model, known, leaves)
        if strict and self.unexpected:
            raise _C.FormatError(_listing(f"{self._path}: the model has no use for", self.unexpected))
        self._computed = []  # (index, RangeTensor)
        self._constructed = []  # (index, value)
        left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self._buffers = []  # (BufferHome, RangeTensor)
        self._sources, problems = {}, []  # index -> source
        for index, names, shape, dtype in parameters:
            name = next((n for n in names if n in found), None)
            tensor = found.get(name)
            if tensor is None and left_out.intersection(names):
                if constructed and index in constructed:
                    self._constructed.append((index, constructed[index]))
            elif tensor is None or tensor.source is not None:  # the map reports missing tensors and wrong shapes
                piece = (tensor.source if tensor is not None else names[0], shape, 0, 0, None)
                self._sources[index] = (names[0], shape, dtype, [piece])
            elif list(tensor.shape) != list(shape):
                problems.append(f"'{name}' (the model wants {list(shape)}, the checkpoint makes {list(tensor.shape)})")
            elif tensor.runs is None:
                self._computed.append((index, tensor))
            else:
                starts = accumulate((numel for _, _, numel in tensor.runs), initial=0)
                pieces = [(s, leaves.listed[s][0], at, begin, n) for at, (s, begin, n) in zip(starts, tensor.runs)]
                self._sources[index] = (names[0], shape, dtype, pieces)
        self.absent_buffers = [name for name in buffers if name not in found]
        for name, home in buffers.items():
            if name in found and found[name].shape != home.shape:
                problems.append(f"'{name}' (the model wants {list(home.shape)}, found {list(found[name].shape)})")
            elif name in found:
                self._buffers.append((home, found[name]))
        if problems:
            raise _C.FormatError(_listing(f"{self._path}: tensors of another shape than the model's:", problems))
        self._map = _C.WeightMap(list(self._sources.values()), self._checkpoint)

    def read(self, core, known=None, reader=None):
        """Collective: reads this rank's part of the tensors that need no computation.

        Memory: the reader's staging ring. IoError on every rank; it names the first that failed. ``known`` is of
        ``core``'s engine; None: indices among the parameters are indices in ``core``. Several plans can share a
        ``reader``, a _C.WeightReader; None: the plan makes its own."""
        weight_map, indices = self._map, list(self._sources)
        if known is not None:
            parts = [(source, part, known[place]) for place, source in self._sources.items()
                     for part in known[place].parts]
            indices = [part.index for _, part, _ in parts]
            if len(parts) > len(self._sources):
                weight_map = _C.WeightMap([_of_part(*entry) for entry in parts], self._checkpoint)
        (reader or _C.WeightReader(core)).load(core, self._checkpoint, weight_map, indices)

    def compute(self, core, known=None):
        """After ``read``: stores tensors that must be computed, and buffers. All ranks then call
        ``_C.weights_changed``.

        Memory: one of the tensors and its sources."""
        for place, tensor in self._computed:
            _store(core, place, known, tensor.compute(self._checkpoint.read))
        for place, value in self._constructed:
            _store(core, place, known, value)
        for home, tensor in self._buffers:
            home.module._buffers[home.name].copy_(tensor.compute(self._checkpoint.read))

    def warn(self):
        """Logs differences that are no error."""
        if self.unexpected:
            logger.warning("%s", _listing(f"{self._path}: not used by the model:", self.unexpected))
        if self.absent_buffers:
            logger.warning("%s", _listing(f"{self._path}: buffers not in the checkpoint:", self.absent_buffers))


def _of_part(source, part, known):
    """The source of one tile, cut from the source of its parameter."""
    name, shape, dtype, pieces = source
    if len(known.parts) == 1:
        return source
    found = []
    for tensor, whole_shape, at, begin, numel in pieces:
        numel = math.prod(whole_shape) - begin if numel is None else numel
        first, end = max(at, part.first), min(at + numel, part.first + part.numel)
        if first < end:
            found.append((tensor, whole_shape, first - part.first, begin + first - at, end - first))
    return f"{name}[{part.first}:]", [part.numel], dtype, found


def _store(core, place, known, value):
    if known is None or len(known[place].parts) == 1:
        _C.store(core, place if known is None else known[place].parts[0].index, value)
        return
    flat = value.reshape(-1)
    for part in known[place].parts:
        _C.store(core, part.index, flat[part.first : part.first + part.numel])


def _listing(what, names):
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{what} {', '.join(names[:10])}{more}"


# --- models without memory ---


def build_model(model_class, config, dtype, model_arguments):
    """A transformers model with meta parameters of the right shape and real buffers, in eval mode, not tied.

    The only weights with values are those that the model's class leaves out of its checkpoints. These and the buffers
    get the values of ``from_pretrained``: those of the model's constructor and its ``_init_weights``. Returns (model,
    {id(parameter): value} of the weights that the class leaves out)."""
    with register_module_parameter_registration_hook(lambda module, name, parameter: _to_meta(parameter)):
        model = build(model_class, config, dtype, model_arguments)
    for parameter in model.parameters():
        _to_meta(parameter)  # some bypass register_parameter
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # made like a parameter; gets its values below
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    parameters, _ = state_names(model)
    names = [n for n in model._keys_to_ignore_on_save or () if n in parameters]
    left_out = [parameters[n] for n in names]
    for parameter in left_out:
        _swap(parameter, torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad))
    adapter().initialize(model, {id(parameter) for parameter in left_out})
    parameters, _ = state_names(model)  # some modules replaced theirs
    left_out = [parameters[n] for n in names]
    constructed = {id(parameter): parameter.detach().clone() for parameter in left_out}
    for parameter in left_out:
        _to_meta(parameter)
    return model.eval(), constructed


def make_flat(model):
    """Makes every meta parameter empty on the CPU, the same object as before, with its full shape as ``ds_shape``.
    Returns {id(parameter): full shape}."""
    shapes = {}
    for parameter in model.parameters():
        shapes[id(parameter)] = torch.Size(parameter.shape)
        empty = torch.nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad)
        _swap(parameter, empty)
        parameter.ds_shape = shapes[id(parameter)]  # optimizers are chosen by it before the engine owns the parameter
    return shapes


def _to_meta(parameter):
    """Takes a parameter's memory. It stays the same object, so that shared parameters stay shared."""
    if parameter is None or parameter.is_meta:
        return
    meta = torch.empty_like(parameter, device="meta", requires_grad=False)
    _swap(parameter, torch.nn.Parameter(meta, parameter.requires_grad))


def _swap(parameter, other):
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise _C.UsageError(f"the model keeps references to its parameters' memory while it is built ({error}); build "
                            "it as usual and pass it to strata.initialize") from error
