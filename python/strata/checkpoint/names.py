"""Maps names of tensors in checkpoints to names in models. They are equal for plain modules; for its own models
transformers defines conversions (renamings, fused experts, a base model's prefix)."""

import re
from typing import NamedTuple

import torch

from ..model.compiling import plain_name
from .supported_transformers import adapter, is_transformers_model


def state_names(model):
    """({name: parameter}, {name: persistent buffer}); an object with several names has all of them. Gathers nothing."""
    parameters, buffers = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = plain_name(f"{path}." if path else "")
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[prefix + name] = buffer
    return parameters, buffers


class BufferHome(NamedTuple):
    """The module and the name of a buffer. They hold also when the module gets another tensor, on a device, say."""

    module: torch.nn.Module
    name: str
    shape: torch.Size


def homes_of(model, buffers):
    """{name: BufferHome} of ``buffers``, {name: buffer of ``model``}."""
    homes = {id(b): BufferHome(m, own, b.shape) for m in model.modules() for own, b in m._buffers.items()
             if b is not None}  # fmt: skip
    return {name: homes[id(buffer)] for name, buffer in buffers.items()}


def model_tensors(model, known, tensors):
    """Finds the tensors of a checkpoint for each tensor of a model. Returns ({name in the model: RangeTensor}, [names
    in the checkpoint that the model does not use]). ``model`` is any module. A model of transformers keeps the
    conversions that were used, as after ``from_pretrained``, and ``saved_tensors`` reverts these. ``known``: names of
    the model's parameters and buffers. ``tensors``: of the checkpoint, ``Leaves``."""
    if not is_transformers_model(model):
        return {n: t for n, t in tensors.items() if n in known}, [n for n in tensors if n not in known]
    found, unexpected = adapter().to_model(model, known, tensors)
    return found, [name for name in unexpected if not _is_ignored(model, name)]


def saved_tensors(model, tensors):
    """The reverse of ``model_tensors``: {name in the checkpoint: RangeTensor}, of {name in the model: RangeTensor}.

    Tied parameters must be in ``tensors`` once."""
    if not is_transformers_model(model):
        return tensors
    ignored = model._keys_to_ignore_on_save or ()
    return adapter().to_files(model, {n: t for n, t in tensors.items() if n not in ignored})


def names_of(model):
    """({id(parameter): [names]}, {name: persistent buffer}). Names that transformers ties to another one come last."""
    by_name, buffers = state_names(model)
    tied = adapter().tied_names(model) if is_transformers_model(model) else ()
    names = {}
    for name in sorted(by_name, key=tied.__contains__):
        names.setdefault(id(by_name[name]), []).append(name)
    return names, buffers


def _is_ignored(model, name):
    """Whether transformers does not report this tensor of the checkpoint, which the model lacks."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [n for n, _ in model.named_buffers()]
    if any(n.endswith("rotary_emb.inv_freq") for n in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(n.endswith("position_ids") for n in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return any(re.search(p, name) for p in patterns)
