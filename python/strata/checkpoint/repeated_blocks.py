"""The tensors of a checkpoint, and blocks of them whose names differ in a number only: a result for one holds for all.

A model's layers have tensors of the same names and shapes, and libraries convert them alike. Asking a library about
each of ten thousand experts takes longer than reading gigabytes of them. So we ask about the first and the last block
of those that look alike. If both answers differ in the number only, they hold for the blocks between as well."""

import re

from .ranges import RangeTensor

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")  # up to the first number that stands alone
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


def found_by_blocks(convert, tensors, known):
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
