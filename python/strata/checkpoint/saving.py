"""Weights for other programs: ``save_pretrained`` writes a checkpoint that plain transformers loads, ``save_whole`` one
state dict of whole tensors, as ``torch.save`` takes it; ``set_whole_weights`` takes such a state dict."""

import copy
import json
import os
from collections import OrderedDict

import torch

from .. import _C
from ..model.compiling import plain_name
from ..model.parameter import full_shape, gathered
from ..model.tiles import tiles_of
from ..ranks.runtime import agree_after
from ..tiles.host_copy import iter_pieces, values_on_host
from .adapters import is_peft_model, save_adapters
from .names import names_of, saved_tensors, state_names
from .plain_values import from_plain, to_plain
from .ranges import RangeTensor
from .supported_transformers import dtype_name, is_transformers_model
from .whole_files import file_bytes, moved_into, save_whole_file


def save_pretrained(engine, folder, max_shard_size="5GB"):
    """Writes the weights as a Hugging Face checkpoint. Collective; ``engine.save_pretrained`` is this.

    The weights stay sharded: the engine gathers one unit at a time, and rank 0 writes it. Each weight has its
    parameter's dtype, and the name that transformers' own ``save_pretrained`` writes. For transformers models rank 0
    also writes config.json and generation_config.json. An earlier checkpoint in the folder does not change until the
    new one is complete. For a PEFT model the call writes the adapters, as PEFT does. The call makes ``folder`` if need
    be; ``max_shard_size``: bytes of one file at most, as a number or as "5GB", "500MB", "2GiB". IoError on every rank,
    where rank 0 cannot write. UsageError for a ``max_shard_size`` that is no size, and for a version of transformers
    that is not supported."""
    collectives, model = engine._collectives, engine.module
    if is_peft_model(model):
        return save_adapters(engine, folder)
    with agree_after(collectives, "saving the weights"):
        engine.core.require_own_memory()
        shard_max = file_bytes(max_shard_size)
        leaves, buffers = _state_leaves(engine)
        tensors = saved_tensors(model, leaves)
        listed = [(n, list(t.shape), t.dtype, _saved_pieces(t, engine.known)) for n, t in tensors.items()]
    saver = _C.WeightSaver(engine.core, os.fspath(folder), listed, shard_max)
    saver.write_pieces()
    failure = None
    for index, (name, tensor) in enumerate(tensors.items()):
        if not listed[index][3]:
            failure = _save_computed(engine, saver, index, tensor, buffers) or failure
    with agree_after(collectives, "saving the weights"):
        if failure is not None:
            raise failure
    saver.finish()
    with agree_after(collectives, "saving the configuration"):
        if engine.global_rank == 0 and is_transformers_model(model):
            _save_configuration(model, folder)


def _state_leaves(engine):
    """({name: leaf}, {name: buffer}). A parameter's source is its index in ``engine.known``, a buffer's is its name."""
    names, buffers = names_of(engine.module)
    leaves = {}
    for place, known in enumerate(engine.known):
        dtype = engine._described[known.parts[0].index][1].dtype
        leaves[names[id(known.parameter)][0]] = RangeTensor.leaf(place, known.shape, dtype)
    leaves.update((name, RangeTensor.leaf(name, buffer.shape, buffer.dtype)) for name, buffer in buffers.items())
    return leaves, buffers


def _saved_pieces(tensor, all_known):
    """[(parameter in the engine, first element, number of elements)], or [] for a tensor that must be computed."""
    if tensor.runs is None or any(not isinstance(source, int) for source in tensor.sources()):
        return []
    runs = tensor.runs or [(tensor.sources()[0], 0, 0)]
    return [piece for place, first, numel in runs for piece in all_known[place].cut(first, numel)]


def _save_computed(engine, saver, index, tensor, buffers):
    """Writes a tensor that does not consist of runs of parameters; returns the exception where that failed."""
    known = [engine.known[source] for source in tensor.sources() if isinstance(source, int)]
    indices = [one.parts[0].index for one in known if tiles_of(one.parameter) is None]
    writes = engine.global_rank == 0
    cut = [one.parameter for one in known if tiles_of(one.parameter) is not None]
    copies = {id(parameter): values_on_host(parameter, writes) for parameter in cut}

    def values_of(source):
        if not isinstance(source, int):
            return buffers[source].detach()
        parameter = engine.known[source].parameter
        return copies.get(id(parameter), parameter).detach()

    with gathered(engine.core, indices):
        try:
            if writes:
                saver.write(index, tensor.compute(values_of))
        except Exception as error:
            return error
    return None


def _save_configuration(model, folder):
    config = copy.deepcopy(model.config)
    setattr(config, dtype_name(config), model.dtype)  # of its first floating parameter
    config.architectures = [type(model).__name__]
    with moved_into(os.fspath(folder), "the model's configuration") as temporary:
        config.save_pretrained(temporary)
        if model.can_generate():
            model.generation_config.save_pretrained(temporary)


# --- whole tensors ---

WEIGHTS = "pytorch_model.bin"  # where readers look for a whole model


def whole_state_dict(model, keep=True, with_frozen=True):
    """{name: tensor on the host}: ``model.state_dict()`` with whole parameters.

    Collective where parameters are sharded: the engine gathers one unit at a time and copies it to the host. Tensors
    that the model shares are shared in the result. ``keep=False``: take part in gathers, and return None.
    ``with_frozen=False`` leaves out parameters that need no gradient."""
    result, copies = OrderedDict(), {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = plain_name(prefix and prefix + ".")
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad and not with_frozen:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = values_on_host(parameter, keep)
            result[prefix + name] = copies[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if keep and name not in module._non_persistent_buffers_set:
                result[prefix + name] = buffer.detach().cpu().clone()
    return result if keep else None


def set_whole_weights(engine, state_dict, strict=True, may_miss=()):
    """Gives the engine's model the values of a state dict. Collective; rank 0's names and values count, those of other
    ranks do not. The call checks all names and shapes before it changes a value. With ``strict`` names of ``may_miss``
    may be missing. Returns (missing keys, unexpected keys), as ``torch.nn.Module.load_state_dict``. UsageError on every
    rank where names or shapes do not fit."""
    parameters, buffers = state_names(engine.module)
    left = _of_rank_0(engine, state_dict, buffers)
    shapes = {name: full_shape(p) for name, p in parameters.items()} | {name: b.shape for name, b in buffers.items()}
    for name, shape in shapes.items():
        if name in left and left[name].shape != torch.Size(shape):
            raise _C.UsageError(f"'{name}' has another shape: wanted {list(shape)}; found {list(left[name].shape)}")
    missing = [name for name in shapes if name not in left]
    there = [(parameter, left.pop(name)) for name, parameter in parameters.items() if name in left]
    values = [(buffer, left.pop(name)) for name, buffer in buffers.items() if name in left]
    lost = [name for name in missing if name not in may_miss]
    if strict and (lost or left):
        raise _C.UsageError(f"the state dict does not fit the model: missing {lost[:3]}, unexpected "
                            f"{list(left)[:3]}; pass strict=False to take what fits")
    with torch.no_grad():
        for parameter, value in there:
            for begin, end, rows in iter_pieces(parameter, modifier_rank=0):
                rows.copy_(value[begin:end] if value.dim() else value)
        for buffer, value in values:
            buffer.copy_(value)
    return torch.nn.modules.module._IncompatibleKeys(missing, list(left))


def _of_rank_0(engine, state_dict, buffers):
    """Rank 0's state dict. On others tensors without memory stand for parameters' values, which count on rank 0."""
    first = engine.global_rank == 0
    with agree_after(engine._collectives, "loading the state dict"):
        own = {plain_name(n): v for n, v in state_dict.items() if isinstance(v, torch.Tensor)} if first else {}
        listed = json.dumps([[n, list(v.shape), str(v.dtype).removeprefix("torch."),
                              to_plain(v, None, n) if n in buffers and v.numel() else None] for n, v in own.items()])
    text = engine._collectives.all_gather_text(listed)[0]
    if first:
        return own
    result = {}
    for name, shape, dtype, content in json.loads(text):
        without_memory = torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)
        result[name] = without_memory if content is None else from_plain(content, None)
    return result


def save_whole(engine, folder, filename, with_frozen):
    """Writes ``whole_state_dict`` with ``torch.save``, by rank 0. Collective. Under the name that readers of a folder
    look for, the file replaces the weights of earlier saves in any format, since readers may take those. IoError on
    every rank, where rank 0 cannot write."""
    first = engine.global_rank == 0
    state_dict = whole_state_dict(engine.module, first, with_frozen)
    path = os.path.join(folder, filename)
    with agree_after(engine._collectives, f"writing '{path}'"):
        if first:
            save_whole_file(state_dict, path)
            if filename == WEIGHTS:
                _C.remove_other_weights(os.fspath(folder), {filename})
