"""``deepspeed.comm`` and ``deepspeed.utils.groups``: torch.distributed's functions, and those of DeepSpeed that torch
lacks."""

import os

import torch.distributed as dist

from ..ranks import runtime


def is_initialized():
    """bool: whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None,
                     init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Opens torch's default process group where there is none, from the environment of torchrun. RuntimeError where
    there must be a group already and is none, and for a group of other ranks than the launcher's.

    Args:
        dist_backend, timeout: as of ``strata.init_distributed``.
        init_method, rank, world_size: as ``torch.distributed.init_process_group`` takes them; a rank or world size of
            -1 comes from the environment.
        dist_init_required: False: there must be a group already.
        distributed_port: of rank 0, where the environment names none.
        auto_mpi_discovery, verbose, config: accepted for DeepSpeed's sake; Strata does not use MPI.
    """
    if is_initialized() or dist_init_required is False:
        runtime.require_group()
        return
    is_told = init_method is not None or (rank >= 0 and world_size > 0)
    if is_told or "RANK" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if is_told:
        dist.init_process_group(dist_backend, init_method=init_method, rank=rank, world_size=world_size,
                                timeout=timeout)
    else:
        runtime.init_distributed(dist_backend, timeout)


def get_rank(group=None):
    """int: this process's rank; 0 without a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group=None):
    """int: the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank():
    """int: this process's number on its host, LOCAL_RANK; 0 where no launcher says one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group():
    """The default process group; None without one."""
    return dist.group.WORLD if is_initialized() else None


def get_all_ranks_from_group(group=None):
    """[int]: the ranks of a group; of the default one where None."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


# Whether this torch has an operation; the rank and the number of ranks of a model that is not cut between ranks.
yes, zero, one = (lambda: True), (lambda: 0), (lambda: 1)
