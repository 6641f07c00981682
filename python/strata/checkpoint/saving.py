"""``save_pretrained``: sharded weights as a checkpoint that plain transformers loads."""

import copy
import os

from .. import _C
from ..model.tiles import tiles_of
from ..ranks.runtime import agree_after
from ..tiles.host_copy import values_on_host
from .adapters import is_peft_model, save_adapters
from .names import preferred_names, saved_tensors, state_names
from .ranges import RangeTensor
from .supported_transformers import is_transformers_model
from .torch_file import moved_into


def save_pretrained(engine, folder, max_shard_size="5GB"):
    """Writes the weights as a Hugging Face checkpoint. Collective; ``engine.save_pretrained`` is this.

    The weights stay sharded: the engine gathers one unit at a time, and rank 0 writes it. Each weight has its
    parameter's dtype, and the name that transformers' own ``save_pretrained`` writes. For transformers models
    rank 0 also writes config.json and generation_config.json. An earlier checkpoint in the folder does not change
    until the new one is complete. For a PEFT model the call writes the adapters, as PEFT does.

    Args:
        folder: made if need be.
        max_shard_size: bytes of one file at most, as a number or as "5GB", "500MB", "2GiB".

    Raises:
        IoError: on every rank, where rank 0 cannot write.
        UsageError: for a ``max_shard_size`` that is no size, and for a version of transformers that is not supported.
    """
    collectives, model = engine._collectives, engine.module
    if is_peft_model(model):
        return save_adapters(engine, folder)
    with agree_after(collectives, "saving the weights"):
        engine.core.require_own_memory()
        shard_max = _parse_size(max_shard_size)
        weights, buffers = _state_leaves(engine)
        tensors = saved_tensors(model, {**weights, **buffers[0]})
        listed = [(n, list(t.shape), t.dtype, _saved_pieces(t, engine.known)) for n, t in tensors.items()]
    saver = _C.WeightSaver(engine.core, os.fspath(folder), listed, shard_max)
    saver.write_pieces()
    failure = None
    for index, (name, tensor) in enumerate(tensors.items()):
        if not listed[index][3]:
            failure = _save_computed(engine, saver, index, tensor, buffers[1]) or failure
    with agree_after(collectives, "saving the weights"):
        if failure is not None:
            raise failure
    saver.finish()
    with agree_after(collectives, "saving the configuration"):
        if engine.global_rank == 0 and is_transformers_model(model):
            _save_configuration(model, folder)


def _state_leaves(engine):
    """({name: leaf of a parameter}, ({name: leaf of a buffer}, {source: buffer})). A parameter's source is its index in
    ``engine.known``, a buffer's is ("buffer", name)."""
    by_name, buffers = state_names(engine.module)
    place_of = {id(known.parameter): i for i, known in enumerate(engine.known)}
    weights = {}
    for name in preferred_names(engine.module, by_name):
        known = engine.known[place_of[id(by_name[name])]]
        dtype = engine._described[known.parts[0].index][1].dtype
        weights[name] = RangeTensor.leaf(place_of[id(known.parameter)], known.shape, dtype)
    values = {("buffer", name): buffer for name, buffer in buffers.items()}
    return weights, ({n: RangeTensor.leaf(("buffer", n), b.shape, b.dtype) for n, b in buffers.items()}, values)


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
    engine.core.gather(indices)
    try:
        if writes:
            saver.write(index, tensor.compute(lambda s: _source_values(engine, s, buffers, copies)))
    except Exception as error:
        return error
    finally:
        engine.core.release(indices, True)
    return None


def _source_values(engine, source, buffers, copies):
    if not isinstance(source, int):
        return buffers[source].detach()
    parameter = engine.known[source].parameter
    return copies.get(id(parameter), parameter).detach()


def _save_configuration(model, folder):
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # of its first floating parameter
    config.architectures = [type(model).__name__]
    try:
        with moved_into(os.fspath(folder)) as temporary:
            config.save_pretrained(temporary)
            if model.can_generate():
                model.generation_config.save_pretrained(temporary)
    except OSError as error:
        raise _C.IoError(f"the model's configuration could not be written: path={folder}: {error}") from error


def _parse_size(size):
    if isinstance(size, int):
        return size
    size_bytes = _C.parse_size(size)
    if size_bytes is None:
        raise _C.UsageError(f"max_shard_size must be a number of bytes or like '5GB' or '512MiB'; got {size!r}")
    return size_bytes
