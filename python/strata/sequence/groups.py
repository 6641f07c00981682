"""Sequence groups: consecutive ranks that hold pieces of the same rows, after DeepSpeed's Ulysses (arXiv 2309.14509).
Parameters, gradients and states are sharded over all ranks all the same. A process has one such grouping at a time, as
it has one default process group. The functions have the names of ``deepspeed.utils.groups`` and of the ``mpu``
``deepspeed.runtime.sequence_parallel.parallel_state_sp``."""

from contextlib import contextmanager

import torch.distributed as dist

from .. import _C
from ..ranks.runtime import init_distributed


class SequenceGroup:
    """This rank's group. ``size``: its ranks. ``rank``: this one's place there. ``group``: the process group; None for
    one rank. ``tokens``: of every row; None: any number."""

    current = None  # the grouping of this process; None: there is none
    core = None  # a weak reference to the _C.ShardedModel of its latest engine

    def __init__(self, size):
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise _C.ConfigError(f"sequence parallelism: groups of {size} ranks do not divide the {world} ranks")
        self.size, self.rank, self.group, self.tokens = size, 0, None, None
        for first in range(0, world, size) if size > 1 else ():  # every rank makes every group, in one order
            group = dist.new_group(range(first, first + size))
            if first <= dist.get_rank() < first + size:
                self.group, self.rank = group, dist.get_rank() - first

    @contextmanager
    def exchanging(self):
        """A context for a collective call of the group. Where a peer is lost, the engine's CommError names the rank
        that has ended, and what ended it."""
        try:
            yield
        except RuntimeError:
            core = self.core and self.core()
            if core is not None and core.alive:
                core.wait_for_all()
            raise


def initialize_sequence_parallel(sequence_parallel_size):
    """The ``SequenceGroup`` of that many ranks, this process's from now on; engines keep theirs. Collective, unless it
    is there. ConfigError where the size does not divide the ranks."""
    if get_sequence_parallel_world_size() != sequence_parallel_size:
        init_distributed()
        SequenceGroup.current = SequenceGroup(sequence_parallel_size)
    return SequenceGroup.current


def get_sequence_parallel_world_size():
    """int: the ranks of a group; 1 without sequence parallelism."""
    return 1 if SequenceGroup.current is None else SequenceGroup.current.size


def get_sequence_parallel_rank():
    """int: this rank's place in its group; 0 without sequence parallelism."""
    return 0 if SequenceGroup.current is None else SequenceGroup.current.rank


def get_sequence_parallel_group():
    """torch.distributed.ProcessGroup of this rank's sequence group. UsageError without sequence parallelism."""
    if get_sequence_parallel_world_size() == 1:
        raise _C.UsageError("there is no sequence parallelism in this process; set strata.sequence_parallel.size, or "
                            "sp_size of accelerate's ParallelismConfig, above 1")
    return SequenceGroup.current.group


def get_data_parallel_world_size():
    """int: the number of sequence groups, which train on different rows."""
    return (dist.get_world_size() if dist.is_initialized() else 1) // get_sequence_parallel_world_size()
