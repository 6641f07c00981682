"""Where this process stands among the others: torch.distributed, and the collectives chosen for it."""

import os
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from . import _C


_FAILED = "failed: "
_FAREWELL_S = 5.0  # how long a rank that failed waits for the others to hear of it


def init_distributed(dist_backend="gloo", timeout=None, **_ignored):
    """Opens torch's default process group from the environment (torchrun's RANK, WORLD_SIZE, ...) if there
    is none and the environment names more than one rank. A no-op otherwise.

    Args:
        dist_backend: of torch.distributed.
        timeout: a ``datetime.timedelta``; torch's default when None.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    dist.init_process_group(dist_backend, **({} if timeout is None else {"timeout": timeout}))


def rank_and_world_size():
    """(rank, world size) of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_collectives(kind, timeout_s):
    """How the ranks exchange bytes.

    Args:
        kind: "auto", "shm" (processes of one host, shared memory), "c10d" (torch's process group) or
            "local" (one rank). "auto" takes shm when all ranks are on one host, else c10d.
        timeout_s: seconds a rank waits for another that lives but does not come.

    Errors: ``CommError`` when ranks cannot reach each other or one failed before; ``ConfigError`` for "local" with several ranks.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return _C.single_rank()
    if kind == "local":
        raise _C.ConfigError(
            f"strata.collectives: 'local' is for one rank, or for ranks that are threads; found {world_size} "
            "processes. Write 'auto'"
        )
    store = dist.distributed_c10d._get_default_store()
    hosts = _exchange(timeout_s, _host_identity())
    for other, text in enumerate(hosts):
        if text.startswith(_FAILED):
            raise _C.CommError(f"rank {other} failed before the ranks met: {text[len(_FAILED):]}")
    if kind == "auto":
        kind = "shm" if len(set(hosts)) == 1 else "c10d"
    if kind == "shm":
        return _C.shm_collectives(store, rank, world_size, timeout_s)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _C.c10d_collectives(group._get_backend(torch.device("cpu")), store, group.group_name, "gloo")


@contextmanager
def telling_the_others():
    """For what a rank does before ``make_collectives``: if it fails, the others learn of it there, instead of
    waiting for a rank that has left."""
    try:
        yield
    except Exception as error:
        if rank_and_world_size()[1] > 1:
            with suppress(_C.CommError):  # nobody came to hear it
                _exchange(_FAREWELL_S, f"{_FAILED}{error}")
        raise


def _exchange(timeout_s, text):
    rank, world_size = rank_and_world_size()
    return _C.exchange_text(dist.distributed_c10d._get_default_store(), rank, world_size, timeout_s, text)


def _host_identity():
    """Equal for processes that can read each other's memory: same boot of one kernel, same PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
