"""The offset of each element of the trained parameters in the flat tensors of each rank of DeepSpeed's ZeRO.

At stages 1 and 2 each param group is one flat tensor, padded to a multiple of twice the number of ranks, and each rank
has an equal range of it. At stage 3 each parameter is cut into as many equal parts as there are ranks, and a rank's
flat tensor of a sub-group holds its parts. A param group has several sub-groups where its part exceeds
``sub_group_size`` elements.
"""

import math
from dataclasses import dataclass


@dataclass
class Run:
    """Elements [begin, begin + numel) of a parameter lie at ``at`` in the flat tensor ``flat`` of ``rank``."""

    rank: int
    flat: int
    at: int
    begin: int
    numel: int


class Layout:
    """The offsets of all trained parameters.

    Args:
        groups: [{name: shape}], by param group, in the optimizer's order. Parameters without elements are left out.
        world_size: number of ranks that DeepSpeed will train on.
        stage: of ZeRO, 1 to 3.
        sub_group_size: elements of a rank, of the configuration; counts at stage 3.

    Attributes:
        shapes: [{name: shape}] by flat tensor.
        numel: [elements of each flat tensor of one rank].
        group_flats: [[flat tensors]] by param group.
        paddings: [[elements at the end of each rank's flat tensor that belong to no parameter]] by rank, at stages 1
            and 2.
    """

    def __init__(self, groups, world_size, stage, sub_group_size):
        self.world_size, self.stage = world_size, stage
        self.shapes, self.group_flats = [], []
        for group in groups:
            members = [group] if stage < 3 else self._sub_groups(group, sub_group_size)
            self.group_flats.append(list(range(len(self.shapes), len(self.shapes) + len(members))))
            self.shapes += members
        self.numel = [self._numel_of(shapes) for shapes in self.shapes]
        self._places = {}
        for flat, shapes in enumerate(self.shapes):
            at = 0
            for name, shape in shapes.items():
                self._places[name] = (flat, at, math.prod(shape))
                at += self._step(math.prod(shape))
        self.paddings = [[self._padding(flat, rank) for flat in range(len(self.shapes))] for rank in range(world_size)]

    def _step(self, numel):
        """Elements from the offset of one parameter to that of the next."""
        return math.ceil(numel / self.world_size) if self.stage == 3 else numel

    def _sub_groups(self, group, size):
        parts = {name: self._step(math.prod(shape)) for name, shape in group.items()}
        if size >= sum(parts.values()):
            return [group]
        result, members, held = [], {}, 0
        for name, shape in group.items():
            members[name] = shape
            held += parts[name]
            if held >= size:
                result.append(members)
                members, held = {}, 0
        return result + [members] if members else result

    def _numel_of(self, shapes):
        own = sum(self._step(math.prod(shape)) for shape in shapes.values())
        if self.stage == 3:
            return own
        alignment = 2 * self.world_size
        return math.ceil(own / alignment) * alignment // self.world_size

    def _padding(self, flat, rank):
        whole = sum(math.prod(shape) for shape in self.shapes[flat].values())
        return min(max(self.numel[flat] * (rank + 1) - whole, 0), self.numel[flat])

    def runs_of(self, name):
        """[``Run``] of a parameter, which together hold each of its elements once."""
        flat, at, numel = self._places[name]
        if self.stage == 3:
            part = self._step(numel)
            return [Run(rank, flat, at, begin, min(part, numel - begin))
                    for rank in range(self.world_size) if (begin := rank * part) < numel]
        size, result = self.numel[flat], []
        for rank in range(at // size, self.world_size):
            low, high = max(at, rank * size), min(at + numel, (rank + 1) * size)
            if low >= high:
                break
            result.append(Run(rank, flat, low - rank * size, low - at, high - low))
        return result

    def fragments(self, rank):
        """[{name: (numel, start)}] by flat tensor: the parameters' elements in the rank's flat tensors."""
        result = [{} for _ in self.shapes]
        for name in self._places:
            for run in self.runs_of(name):
                if run.rank == rank:
                    result[run.flat][name] = (run.numel, run.at)
        return result
