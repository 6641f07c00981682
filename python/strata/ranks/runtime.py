"""Where this process stands among the others: torch.distributed, and the collectives chosen for it."""

import atexit
import itertools
import logging
import os
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import _C
from .carriers import join, nccl_runs, require_sensible, wanted_carriers

logger = logging.getLogger("strata")

_FAILED = "failed: "
_FAREWELL_S = 5.0  # how long a rank that failed waits for the others to hear of it
_bulk_groups = itertools.count()  # of this process; every rank counts alike


def init_distributed(dist_backend=None, timeout=None, **_ignored):
    """Opens torch's default process group from the environment (torchrun's RANK, WORLD_SIZE, ...), of this process
    alone where no launcher has set it, so that scripts may use torch.distributed either way. The group is destroyed
    when the program ends, unless the script does so itself. A no-op where there is one.

    Args:
        dist_backend: of torch.distributed; None: gloo, and NCCL beside it where GPUs can be used.
        timeout: a ``datetime.timedelta``; torch's default when None.
    """
    if dist.is_initialized():
        return
    if dist_backend is None:
        dist_backend = "cpu:gloo,cuda:nccl" if _C.usable_gpus() else "gloo"
    options = {} if timeout is None else {"timeout": timeout}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(dist_backend, **options)
    else:
        try:
            dist.init_process_group(dist_backend, store=dist.HashStore(), rank=0, world_size=1, **options)
        except RuntimeError as error:  # a host without any network; one rank can do without the group
            logger.warning("torch.distributed cannot be used: no process group of this one process: %s", error)
            return
    atexit.register(_destroy_group, dist.group.WORLD)


def _destroy_group(group):
    """At the end of the program, after engines have left (exit hooks run last in, first out)."""
    if dist.is_initialized() and dist.group.WORLD is group:
        try:
            dist.destroy_process_group()
        except Exception as error:  # peers that died, or a GPU that is lost: who failed has said so
            logger.debug("the process group could not be destroyed: %s", error)


def rank_and_world_size():
    """(rank, world size) of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_collectives(config, device):
    """How the ranks exchange bytes.

    Between GPUs of one host weights and gradients go from memory to memory by copy engines (peer) where all of them
    reach each other, else through NCCL; the configuration's ``gather`` and ``reduce`` choose for each of the two
    apart.

    In shard groups of several ranks each, the ranks of a group and the replicas of a slice are joined apart, by what
    fits them: past one host memory inside, the network across.

    Args:
        config: a _C.Config. Its ``collectives``: "auto", "shm" (processes of one host, shared memory), "c10d" (torch's
            process group, gloo), "peer" (copies between the memories of one host's ranks), "nccl" (GPUs alone) or
            "local" (one rank). "auto" takes shm when all ranks are on one host, else c10d; and between GPUs peer or
            nccl beside it. Ranks may share a GPU under "peer" alone. Of shard groups, "shm" and "peer" are for the
            ranks inside, and across where these are on one host, too. Its ``timeout_s``: seconds a rank waits for
            another that lives but does not come.
        device: torch.device of this rank's model.

    Errors: ``CommError`` when ranks cannot reach each other or one failed before; ``ConfigError`` for a kind that
    does not fit the ranks or the device, and for ranks that share a GPU.
    """
    kind, timeout_s = config.collectives, config.timeout_s
    rank, world_size = rank_and_world_size()
    with telling_the_others():
        named = {kind, config.gather, config.reduce}
        _require_possible(kind, world_size, device)
        group_size = config.shard_group_size(world_size)
        require_sensible(config, world_size, group_size, device)
    if world_size == 1:
        return _C.single_rank(device)
    answers = _exchange(timeout_s, "\n".join((
        _host_identity(), _device_identity(device), _describe_groups(config, group_size),
        f"{kind}, {config.gather} and {config.reduce}", str(nccl_runs(device)),
    )))
    for other, text in enumerate(answers):
        if text.startswith(_FAILED):
            raise _C.CommError(f"rank {other} failed before the ranks met: {text[len(_FAILED):]}")
    hosts, devices, groups, kinds, running = zip(*(text.split("\n") for text in answers))
    _require_same("zero_optimization.mics_shard_size, zero_hpz_partition_size", "shard groups", groups)
    _require_same("strata.collectives, strata.gather and strata.reduce", "collectives", kinds)
    if named - {"auto"} != {"peer"}:
        _require_own_devices(hosts, devices)
    first = rank - rank % group_size
    inside = _Part(range(first, first + group_size), hosts)
    if kind == "peer" and not inside.one_host:
        raise _C.ConfigError("strata.collectives: 'peer' joins ranks of one host, and these are on several; write 'auto'")
    joined = _join(inside, kind, config, device, group_size == world_size and set(running) == {"True"})
    if group_size == world_size:
        return joined
    across = _Part(range(rank % group_size, world_size, group_size), hosts)
    if kind in ("shm", "peer") and not across.one_host:
        kind = "auto"
    return _C.grouped_collectives(joined, _join(across, kind, config, device, False), device, config.secondary_shards)


class _Part:
    """Ranks that exchange bytes with each other.

    Args:
        ranks: range of their numbers in the world; this rank is one of them.
        hosts: by rank of the world, what tells hosts apart.
    """

    def __init__(self, ranks, hosts):
        self.ranks, self.one_host = ranks, len({hosts[rank] for rank in ranks}) == 1
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.numbers = (ranks.start, ranks.step)  # what they are called in errors
        self.store = dist.PrefixStore(
            f"ranks-{ranks.start}-{ranks.stop}-{ranks.step}", dist.distributed_c10d._get_default_store()
        )

    def new_group(self, backend, timeout_s):
        """A process group of theirs; of all ranks where these are all."""
        timeout = timedelta(seconds=timeout_s)
        if self.size == dist.get_world_size():
            return dist.new_group(backend=backend, timeout=timeout)
        return dist.new_group(list(self.ranks), backend=backend, timeout=timeout, use_local_synchronization=True)


def _join(part, kind, config, device, probes):
    """The collectives of a part of the ranks. ``probes``: of carriers.join."""
    timeout_s = config.timeout_s
    if part.size == 1:
        return _C.single_rank(device)
    if kind == "shm" or (kind != "c10d" and part.one_host):
        control = _C.shm_collectives(part.store, part.rank, part.size, timeout_s, part.numbers)
    else:
        group = part.new_group("gloo", timeout_s)
        control = _C.c10d_collectives(
            group._get_backend(torch.device("cpu")), part.store, group.group_name, "gloo", part.numbers
        )
    wanted = wanted_carriers(config, kind, part.one_host, device)
    if wanted is None:
        return control
    return join(part, control, config, wanted, device, f"nccl/{next(_bulk_groups)}", probes)


def _require_possible(kind, world_size, device):
    if kind == "local" and world_size > 1:
        raise _C.ConfigError(
            f"strata.collectives: 'local' is for one rank, or for ranks that are threads; found {world_size} "
            "processes. Write 'auto'"
        )
    if kind == "nccl" and device.type != "cuda":
        raise _C.ConfigError(
            f"strata.collectives: 'nccl' joins GPUs, and the model trains on {device}; write 'auto'"
        )
    if world_size > 1 and device.type == "cuda" and kind != "peer" and not dist.is_nccl_available():
        raise _C.ConfigError(
            f"strata.device: {world_size} ranks on GPUs need NCCL, and this build of torch has none; write 'cpu'"
        )


def _describe_groups(config, size):
    return f"secondary groups of {size}" if config.secondary_shards else f"groups of {size}"


def _require_same(keys, what, by_rank):
    """``by_rank``: what ``keys`` of the configuration make, a text a rank."""
    for rank, found in enumerate(by_rank):
        if found != by_rank[0]:
            raise _C.ConfigError(
                f"{keys}: every rank must use the same {what}; found {by_rank[0]} on rank 0 and {found} on rank {rank}"
            )


def _require_own_devices(hosts, devices):
    """``hosts``, ``devices``: what tells them apart, by rank."""
    kinds = [device.split()[0] for device in devices]
    owners = {}
    for rank, place in enumerate(zip(hosts, devices)):
        if kinds[rank] != kinds[0]:
            raise _C.ConfigError(
                f"strata.device: all ranks must train on the same kind of device; found rank 0 on {kinds[0]} and "
                f"rank {rank} on {kinds[rank]}"
            )
        other = owners.setdefault(place, rank)
        if kinds[rank] != "cpu" and other != rank:
            raise _C.ConfigError(
                f"strata.device: ranks {other} and {rank} are on one GPU; give each its own by LOCAL_RANK or "
                f"CUDA_VISIBLE_DEVICES. Found {devices[rank]}"
            )


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


def _device_identity(device):
    if device.type == "cpu":
        return "cpu"
    return f"{device.type} {torch.cuda.get_device_properties(device).uuid}"
