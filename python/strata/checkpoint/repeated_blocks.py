"""Blocks of a checkpoint whose names differ in a number only: a result for one holds for all.

A model's layers have tensors of the same names and shapes, and libraries convert them alike. Asking a library about
each of ten thousand experts takes longer than reading gigabytes of them. So we ask about the first and the last
block of those that look alike. If both answers differ in the number only, they hold for the blocks between as well.
"""

import re

from .ranges import RangeTensor

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
    groups = []  # (prefix, content, [beginnings])
    for (prefix, number), content in blocks.items():
        for other, alike, members in groups:
            if other == prefix and alike == content:
                members.append((prefix, number))
                break
        else:
            groups.append((prefix, content, [(prefix, number)]))
    return [members for _, _, members in groups]
