"""Discards the shards of constructors that failed. It frees them when every rank has failed there, since a slower rank
may still read them, and when no view of their memory exists."""

import itertools
import time

import torch
import torch.distributed as dist

_PATIENCE_S = 5.0  # how long a rank that failed waits for the others to fail, too
_count = itertools.count()  # of failures; the same on all ranks, where all fail alike
_waiting = []  # (mark in the store, the object that has the shards)


def give_up(born, where, device):
    """Discards ``born``, [objects with shards, ``is_viewed()`` and ``give_up()``], of a constructor that failed at
    ``where``. Where other ranks do not fail there in time, a later ``free()`` frees the shards."""
    if not born:
        return
    mark = f"strata.init/failed/{next(_count)}/{where}"
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # this rank's reads of its peers have ended
    _ranks_at(mark, 1)
    _waiting.extend((mark, one) for one in born)
    deadline = time.monotonic() + _PATIENCE_S
    while not _all_are_at(mark) and time.monotonic() < deadline:
        time.sleep(0.002)
    free()


def free():
    """Frees the shards that can be freed now. Does not wait for other ranks."""
    there = {mark: _all_are_at(mark) for mark in {mark for mark, _ in _waiting}}
    staying = []
    while _waiting:
        mark, born = _waiting.pop()
        if not born.core.alive:
            continue
        if not there[mark] or born.is_viewed():
            staying.append((mark, born))
        else:
            born.give_up()
    _waiting.extend(staying)


def _all_are_at(mark):
    return dist.is_initialized() and _ranks_at(mark, 0) >= dist.get_world_size()


def _ranks_at(mark, more):
    return dist.distributed_c10d._get_default_store().add(mark, more)
