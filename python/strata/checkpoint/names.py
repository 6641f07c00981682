"""Maps names of tensors in checkpoints to names in models. They are equal for plain modules; for its own models
transformers defines conversions (renamings, fused experts, a base model's prefix)."""

import re
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch

from .. import _C
from .ranges import RangeTensor
from .supported_transformers import is_transformers_model, private


def state_names(model):
    """({name: parameter}, {name: persistent buffer}); an object with several names has all of them. Gathers nothing."""
    parameters, buffers = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
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
    mapping = private("get_model_conversion_mapping")(model)
    convert = partial(_converted, model, mapping, known, tensors)
    answer = None
    if not any(_NUMBER_IN_PATTERN.search(pattern) for c in mapping for pattern in c.source_patterns):
        with suppress(_C.FormatError):  # with all names there may be no error, or one that says more
            answer = _converted_by_blocks(convert, tensors, known)
    found, unexpected = answer or convert(tensors)
    model._weight_conversions = [c for c in mapping if c.was_used()]
    return found, [n for n in _in_natural_order(unexpected) if not _is_ignored(model, n)]


def _converted(model, mapping, known, tensors, asked):
    """``model_tensors`` for the names ``asked``, by transformers' conversions ``mapping``."""
    renaming, rename_source_key = private("WeightRenaming"), private("rename_source_key")
    renamings = [c for c in mapping if isinstance(c, renaming)]
    converters = [c for c in mapping if not isinstance(c, renaming)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    names = dict.fromkeys(known, True)
    groups, unexpected = {}, []  # the conversion that makes each tensor of the model
    for name in _in_natural_order(asked):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target not in names and name in names:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, names)
        if target not in names:
            unexpected.append(name)
            continue
        if target not in groups:
            groups[target] = renaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        groups[target].add_tensor(target, name, name if pattern is None else pattern, tensors[name])
    converted = {}
    for target, group in groups.items():
        sources = [name for names in group.layer_targets.values() for name in names]
        try:
            result = group.convert(target, model=model, config=model.config)
        except Exception as error:
            raise _C.FormatError(
                f"transformers cannot make '{target}' of the checkpoint's {sorted(sources)[:4]} "
                f"({len(sources)} tensors): {error}"
            ) from error
        for name, tensor in result.items():
            converted[name] = tensor[0] if isinstance(tensor, list) else tensor
    return converted, unexpected


def saved_tensors(model, tensors):
    """The reverse of ``model_tensors``: {name in the checkpoint: RangeTensor}, of {name in the model: RangeTensor}.

    Tied parameters must be in ``tensors`` once.
    """
    if not is_transformers_model(model):
        return tensors
    ignored = model._keys_to_ignore_on_save or ()
    return private("revert_weight_conversion")(model, {n: t for n, t in tensors.items() if n not in ignored})


def preferred_names(model, names):
    """[name] with one of each parameter's names: not one that transformers ties to another. ``names``: {name:
    parameter}."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    chosen = {}
    for name, parameter in names.items():
        if id(parameter) not in chosen or (chosen[id(parameter)] in tied and name not in tied):
            chosen[id(parameter)] = name
    kept = set(chosen.values())
    return [name for name in names if name in kept]


def _in_natural_order(names):
    """Sorts as transformers does: numbers count as numbers, so that expert 10 comes after expert 2. A name's key
    consists of its parts' keys, which are cached: ten thousand names have some hundred different parts."""
    dot_natural_key = private("dot_natural_key")

    class Keys(dict):
        def __missing__(self, part):
            (self[part],) = dot_natural_key(part)
            return self[part]

    key_of = Keys().__getitem__
    return sorted(names, key=lambda name: [*map(key_of, name.split("."))])


def _is_ignored(model, name):
    """Whether transformers does not report this tensor of the checkpoint, which the model lacks."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [n for n, _ in model.named_buffers()]
    if any(n.endswith("rotary_emb.inv_freq") for n in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(n.endswith("position_ids") for n in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return any(re.search(p, name) for p in patterns)


# --- blocks whose names differ in a number only: a result for one holds for all ---

# A model's layers have tensors of the same names and shapes, and libraries convert them alike. Asking a library about
# each of ten thousand experts takes longer than reading gigabytes of them. So we ask about the first and the last
# block of those that look alike. If both answers differ in the number only, they hold for the blocks between as well.

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")  # up to the first number that stands alone
_NUMBER_IN_PATTERN = re.compile(r"(?<![A-Za-z0-9_])\d")  # not that of a name, as in "w1"
_ASKED = 2  # of the blocks that are alike


class Leaves:
    """The tensors of a checkpoint, as RangeTensors by name, each made when it is asked for. Made of [(name, shape,
    dtype)]; ``listed`` is {name: (shape, dtype)}."""

    def __init__(self, listed):
        self.listed = {name: (shape, dtype) for name, shape, dtype in listed}
        self._made = {}
        self._alike = {}  # (shape, dtype) -> meta tensor; ten thousand tensors have a dozen

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = RangeTensor.leaf(name, *self.listed[name], self._alike)
        return self._made[name]

    def __iter__(self):
        return iter(self.listed)

    def items(self):
        return ((name, self[name]) for name in self)


def _converted_by_blocks(convert, tensors, known):
    """The result of ``convert(tensors)``, from that for a few of alike blocks; None: all names must be asked about.
    ``convert``: [names of tensors] -> ({name in the model: RangeTensor}, [names that the model does not use]).
    ``tensors``: ``Leaves``. ``known``: names in the model."""
    groups, asked = _repeated_blocks(tensors)
    if not groups:
        return None
    found, unused = convert(asked)
    by_block = {block: ({}, []) for group in groups for block in group[:_ASKED]}
    for target, tensor in found.items():
        owners = {block if (block := _block_of(s)) in by_block else None for s in tensor.sources()}
        if owners <= {None}:
            continue
        if len(owners) > 1 or (tensor.source is None and tensor.runs is None):  # or it must be computed
            return None
        by_block[owners.pop()][0][target] = tensor
    for name in unused:
        if _block_of(name) in by_block:
            by_block[_block_of(name)][1].append(name)
    for group in groups:
        first, last = (_without_number(*block, *by_block[block]) for block in group[:_ASKED])
        if first is None or first != last:
            return None
        for prefix, number in group[_ASKED:]:
            beginning = f"{prefix}{number}."
            unused += [beginning + rest for rest in first[1]]
            for (before, after), (source, shape, dtype, runs) in first[0].items():
                target = f"{before}{number}.{after}"
                if target not in known:
                    return None
                found[target] = tensors[beginning + source] if runs is None else RangeTensor.of_runs(
                    [(beginning + rest, begin, numel) for rest, begin, numel in runs], shape, dtype)
    return found, unused


def _repeated_blocks(tensors):
    """([[beginnings of alike blocks]], [names to ask about]). A beginning is a pair: ("model.layers.", "3"). We ask
    about the first blocks of a group."""
    blocks, asked = {}, []
    for name, described in tensors.listed.items():
        parts = _NUMBERED.match(name)
        if parts is None:
            asked.append(name)
        else:
            blocks.setdefault(parts.group(1, 2), {})[parts[3]] = described
    alike = {}
    for beginning, content in blocks.items():
        described = frozenset((rest, tuple(shape), dtype) for rest, (shape, dtype) in content.items())
        alike.setdefault((beginning[0], described), []).append(beginning)
    groups = []
    for group in alike.values():
        if len(group) > _ASKED:
            group[1], group[-1] = group[-1], group[1]
            groups.append(group)
        asked += [f"{prefix}{number}.{rest}" for prefix, number in group[:_ASKED] for rest in blocks[group[0]]]
    return groups, asked


def _block_of(name):
    """The beginning of the block that the name is in, or None."""
    parts = _NUMBERED.match(name)
    return parts and parts.group(1, 2)


def _without_number(prefix, number, tensors, unused):
    """The result for one block, without the block's number: ({parts of the name in the model around the number:
    (source, shape, dtype, runs)}, [unused]), with one of source and runs None, and the rests of names. None where a
    name in the model has another number."""
    made, own = {}, len(f"{prefix}{number}.")
    for target, tensor in tensors.items():
        parts = _NUMBERED.match(target)
        if parts is None or parts[2] != number:
            return None
        whole = tensor.source is not None
        made[parts.group(1, 3)] = (tensor.source[own:] if whole else None, tensor.shape, tensor.dtype,
                                   None if whole else [(s[own:], begin, numel) for s, begin, numel in tensor.runs])
    return made, [name[own:] for name in unused]
