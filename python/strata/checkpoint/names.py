"""Maps names of tensors in checkpoints to names in models. They are equal for plain modules; for its own models
transformers defines conversions (renamings, fused experts, a base model's prefix)."""

import re
from contextlib import suppress
from copy import deepcopy
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
    """Finds the tensors of a checkpoint for each tensor of a model.

    Args:
        model: any module. A model of transformers keeps the conversions that were used, as after
            ``from_pretrained``, and ``saved_tensors`` reverts these.
        known: names of the model's parameters and buffers.
        tensors: of the checkpoint, ``Leaves``.

    Returns:
        ({name in the model: RangeTensor}, [names in the checkpoint that the model does not use]).
    """
    if not is_transformers_model(model):
        return {n: t for n, t in tensors.items() if n in known}, [n for n in tensors if n not in known]
    mapping = private("get_model_conversion_mapping")(model)
    blocks = RepeatedBlocks(tensors, [pattern for c in mapping for pattern in c.source_patterns])
    answer = None
    if blocks.repeat:
        with suppress(_C.FormatError):  # with all names there may be no error, or one that says more
            answer = blocks.complete(*_converted(model, mapping, known, tensors, blocks.asked), known)
    found, unexpected = answer or _converted(model, mapping, known, tensors, tensors)
    model._weight_conversions = [c for c in mapping if c.was_used()]
    return found, [n for n in _in_natural_order(unexpected) if not _is_ignored(model, n)]


def _converted(model, mapping, known, tensors, asked):
    """``model_tensors`` for the names ``asked``, by transformers' conversions ``mapping``."""
    renaming, rename_source_key = private("WeightRenaming"), private("rename_source_key")
    renamings = [c for c in mapping if isinstance(c, renaming)]
    converters = [c for c in mapping if not isinstance(c, renaming)]
    names = dict.fromkeys(known, True)
    groups, unexpected = _Groups(converters), []
    for name in _in_natural_order(asked):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target not in names and name in names:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, names)
        if target in names:
            groups.add(target, name, pattern, tensors[name])
        else:
            unexpected.append(name)
    return groups.convert(model), unexpected


class _Groups:
    """Tensors of a checkpoint, by the tensor of the model that they become."""

    def __init__(self, converters):
        self._renaming = private("WeightRenaming")
        self._by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        self._groups = {}

    def add(self, target, name, pattern, tensor):
        if target not in self._groups:
            self._groups[target] = (
                self._renaming(name, target) if pattern is None else deepcopy(self._by_pattern[pattern])
            )
        self._groups[target].add_tensor(target, name, name if pattern is None else pattern, tensor)

    def convert(self, model):
        converted = {}
        for target, group in self._groups.items():
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
        return converted


def saved_tensors(model, tensors):
    """The reverse of ``model_tensors``: {name in the checkpoint: RangeTensor}, of {name in the model: RangeTensor}.

    Tied parameters must be in ``tensors`` once.
    """
    if not is_transformers_model(model):
        return tensors
    ignored = model._keys_to_ignore_on_save or ()
    return private("revert_weight_conversion")(model, {n: t for n, t in tensors.items() if n not in ignored})


def preferred_names(model, names):
    """[name] with one of each parameter's names: not one that transformers ties to another.

    Args:
        names: {name: parameter}.
    """
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
    """The tensors of a checkpoint, as RangeTensors by name, each made when it is asked for.

    Args:
        listed: [(name, shape, dtype)].
    """

    def __init__(self, listed):
        self._listed = {name: (shape, dtype) for name, shape, dtype in listed}
        self._made = {}
        self._alike = {}  # (shape, dtype) -> meta tensor; ten thousand tensors have a dozen

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = RangeTensor.leaf(name, *self._listed[name], self._alike)
        return self._made[name]

    def __iter__(self):
        return iter(self._listed)

    def items(self):
        return ((name, self[name]) for name in self)

    def blocks(self):
        """({a block's beginning: {the rest of a name: (shape, dtype)}}, [names that are in no block]). A beginning is a
        pair: ("model.layers.", "3")."""
        blocks, others = {}, []
        for name, described in self._listed.items():
            parts = _NUMBERED.match(name)
            if parts is None:
                others.append(name)
            else:
                prefix, number, rest = parts.groups()
                blocks.setdefault((prefix, number), {})[rest] = described
        return blocks, others


class RepeatedBlocks:
    """Groups of alike blocks in a checkpoint.

    Args:
        tensors: ``Leaves``.
        patterns: regular expressions of the library's conversions; if one has a number, no blocks are alike.

    Attributes:
        repeat: whether there are any groups.
        asked: [names] to convert; pass the result to ``complete``.
    """

    def __init__(self, tensors, patterns):
        self._tensors = tensors
        self._groups = []  # [beginnings] of alike blocks: those that we ask about, then the others
        self.asked = []
        blocks = {}
        if not any(_NUMBER_IN_PATTERN.search(pattern) for pattern in patterns):
            blocks, self.asked = tensors.blocks()
        for group in _grouped(blocks):
            if len(group) > _ASKED:
                group[1], group[-1] = group[-1], group[1]
                self._groups.append(group)
            self.asked += [f"{prefix}{number}.{rest}" for prefix, number in group[:_ASKED] for rest in blocks[group[0]]]
        self.repeat = bool(self._groups)

    def complete(self, found, unused, known):
        """The result for the whole checkpoint, from that for the names ``asked``.

        Args:
            found: {name in the model: RangeTensor}, of ``asked``.
            unused: [name in the checkpoint], of ``asked``.
            known: names in the model.

        Returns:
            (found, unused), or None: all names must be asked about.
        """
        found, unused = dict(found), list(unused)
        by_block = {(p, n): _Answer(p, n) for group in self._groups for p, n in group[:_ASKED]}
        for target, tensor in found.items():
            if not _note(by_block, target, tensor):
                return None
        for name in unused:
            parts = _NUMBERED.match(name)
            answer = by_block.get(parts.group(1, 2)) if parts else None
            if answer is not None:
                answer.unused.append(name)
        for group in self._groups:
            first, last = (by_block[beginning] for beginning in group[:_ASKED])
            if first.moved_to(*group[1], known) != last.as_dict():
                return None
            for beginning in group[_ASKED:]:
                moved = first.moved_to(*beginning, known)
                if moved is None:
                    return None
                unused += moved.pop(_UNUSED)
                for target, (source, shape, dtype, runs) in moved.items():
                    found[target] = self._tensors[source] if runs is None else RangeTensor.of_runs(runs, shape, dtype)
        return found, unused


_UNUSED = object()


class _Answer:
    """The result for one block."""

    def __init__(self, prefix, number):
        self._beginning, self._number = f"{prefix}{number}.", number
        self.tensors = {}  # name in the model -> RangeTensor
        self.unused = []

    def as_dict(self):
        """{name in the model: (source, shape, dtype, runs)}, one of source and runs None; and the names that were not
        used."""
        described = {target: _described(tensor, lambda source: source) for target, tensor in self.tensors.items()}
        return {**described, _UNUSED: self.unused}

    def moved_to(self, prefix, number, known):
        """The same for another block; None where the model has no such names."""
        beginning, own = f"{prefix}{number}.", len(self._beginning)

        def moved(source):
            return beginning + source[own:]

        result = {}
        for target, tensor in self.tensors.items():
            parts = _NUMBERED.match(target)
            if parts is None or parts.group(2) != self._number:
                return None
            name = f"{parts.group(1)}{number}.{parts.group(3)}"
            if name not in known:
                return None
            result[name] = _described(tensor, moved)
        return {**result, _UNUSED: [moved(name) for name in self.unused]}


def _described(tensor, moved):
    if tensor.source is not None:
        return moved(tensor.source), tensor.shape, tensor.dtype, None
    return None, tensor.shape, tensor.dtype, [(moved(source), begin, numel) for source, begin, numel in tensor.runs]


def _note(by_block, target, tensor):
    """Adds the tensor to the block of a group that it comes from, if any. False if it comes from such a block and from
    other sources, too, or must be computed."""
    owners = {by_block.get(parts.group(1, 2)) if (parts := _NUMBERED.match(s)) else None for s in tensor.sources()}
    if owners <= {None}:
        return True
    if len(owners) > 1 or (tensor.source is None and tensor.runs is None):
        return False
    owners.pop().tensors[target] = tensor
    return True


def _grouped(blocks):
    """[[beginnings of blocks that are alike]]."""
    groups = {}
    for (prefix, number), content in blocks.items():
        alike = frozenset((rest, tuple(shape), dtype) for rest, (shape, dtype) in content.items())
        groups.setdefault((prefix, alike), []).append((prefix, number))
    return [*groups.values()]
