"""This process's rank in the job: torch.distributed, the collectives that Strata chooses for it, and their end.

Process groups end with the engine that uses them, at the latest with the program. Threads of gloo release tensors that
Python owns; one that does so while the interpreter ends aborts the process. A destroyed group keeps its threads while
any reference to it is left, such as the defaults of ``torch.distributed.nn.functional``, so Strata takes the object
with the threads out of the group."""

import atexit
import itertools
import logging
import os
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from .. import _C
from ..views import logger

# [_C.UsedBackends], each of some collectives, oldest first. Those of gloo were made for these, and end with them.
_used = []
_defaults = []  # [(a weak reference to a default process group, whether Strata has made it)]


def _end_backends(used):
    """Ends the threads that work for collectives, which raise CommError from then on. Waits for operations that this
    rank has started. A second call does nothing."""
    if used in _used:
        _used.remove(used)
    used.let_go()


def record_default(group, made):
    """Records the default process group, whose threads end with the program at the latest. Where Strata has ``made``
    it, the end of the program destroys it, unless the script has done so."""
    if all(known() is not group for known, _ in _defaults):
        _defaults.append((weakref.ref(group), made))


@atexit.register  # with this module, before there are engines: so after they have left, for the last hook runs first
def _end():
    for used in reversed(list(_used)):
        _end_backends(used)
    for known, made in _defaults:
        group = known()
        if group is None:
            continue
        is_registered = group in dist.distributed_c10d._world.pg_map
        if is_registered and not made:
            if "nccl" not in dist.get_backend_config(group):  # the script must destroy a group with NCCL itself
                _C.release_group(group)
            continue
        try:
            if is_registered:
                dist.destroy_process_group(group)
            _C.release_group(group)
        except Exception as error:  # peers that died, or a GPU that is lost: an earlier message has reported it
            logger.debug("a process group could not be destroyed: %s", error)


choices = logging.getLogger(__name__)  # logs the chosen transport
_gloo_numbers = {}  # ranks -> numbers of their groups, in the order in which all of them make these

_FAREWELL_S = 5.0  # how long a rank that failed waits for the others to hear of it


def init_distributed(dist_backend=None, timeout=None, **_ignored):
    """Opens torch's default process group from the environment (torchrun's RANK, WORLD_SIZE, ...). Without a launcher
    the group has this process alone, so that scripts may use torch.distributed either way. The end of the program
    destroys the group, unless the script has done so. Does nothing where there is a group; UsageError where it has
    other ranks than the launcher's. ``dist_backend`` is of torch.distributed; None: gloo, and NCCL beside it where GPUs
    can be used. ``timeout``: a ``datetime.timedelta``; torch's default when None."""
    if dist.is_initialized():
        _require_launchers_group()
        return
    if dist_backend is None:
        dist_backend = "cpu:gloo,cuda:nccl" if _C.usable_gpus() else "gloo"
    if _launched("WORLD_SIZE", 1) > 1:
        dist.init_process_group(dist_backend, timeout=timeout)
    else:
        try:
            dist.init_process_group(dist_backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        except RuntimeError as error:  # a host without any network; one rank can do without the group
            logger.warning("torch.distributed cannot be used: no process group of this one process: %s", error)
            return
    record_default(dist.group.WORLD, made=True)


def require_group():
    """Raises UsageError in a job of several processes that has no default process group, or one of other ranks than
    the launcher's: each would train alone."""
    processes = _launched("WORLD_SIZE", 1)
    if dist.is_initialized():
        _require_launchers_group()
    elif processes > 1:
        raise _C.UsageError("initialize(dist_init_required=False) takes the process group that the script has made, "
                            "and there is none: call torch.distributed.init_process_group() before it, or leave "
                            f"dist_init_required out; the launcher says WORLD_SIZE={processes}")


def _launched(name, otherwise=None):
    """int: RANK or WORLD_SIZE, as the launcher has set it in the environment."""
    text = os.environ.get(name) or None
    try:
        return otherwise if text is None else int(text)
    except ValueError:
        raise _C.UsageError(f"{name} of the environment must be a whole number, as launchers set it; "
                            f"found '{text}'") from None


def _require_launchers_group():
    """Raises UsageError where the default process group is not the one that the launcher's environment describes:
    its ranks would train on parts of the data that are not theirs, or alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    launched_rank, launched_size = _launched("RANK", rank), _launched("WORLD_SIZE", world_size)
    if (launched_rank, launched_size) != (rank, world_size):
        raise _C.UsageError(
            f"torch's default process group has {world_size} ranks, of which this process is rank {rank}, and the "
            f"launcher's environment says WORLD_SIZE={launched_size} and RANK={launched_rank}: make the group from the "
            "environment (torch.distributed.init_process_group() without rank and world_size), or leave it to "
            "strata.initialize; if the group is right, correct or remove these variables")


def rank_and_world_size():
    """(rank, world size) of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def expected_world_size():
    """The world size of the default process group; before ``init_distributed()`` the one that it will have."""
    return dist.get_world_size() if dist.is_initialized() else _launched("WORLD_SIZE", 1)


def make_collectives(config, device, waits=None):
    """Chooses and connects the ranks' transports; returns a _C.Collectives. Collective. docs/design/peers.md says which
    transport moves what. ``config``: a _C.Config; its ``collectives``, ``gather``, ``reduce`` and ``timeout_s`` count
    (docs/CONFIG.md). ``device``: torch.device of this rank's model. ``waits``: ``host_waits`` of its _C.Runtime, which
    then counts the waits of the collectives, too; None: no count.

    Errors: ``CommError`` when ranks cannot reach each other or one failed before; ``ConfigError`` for a kind that does
    not fit the ranks or the device, and for ranks that share a GPU."""
    rank, world_size = rank_and_world_size()
    with notifying_ranks():
        facts = _facts(device)
        _C.require_possible(config, world_size, device, facts["on_gpu"], facts.pop("has_nccl"))
    if dist.is_initialized():
        record_default(dist.group.WORLD, made=False)
    if world_size == 1:
        return _C.single_rank(device, waits)
    for earlier in list(_used):  # some belong to engines without any reference
        if not earlier.in_use():
            _end_backends(earlier)
    collectives, probe, backends = _C.join_ranks(
        config, rank, world_size, device, dist.distributed_c10d._get_default_store(),
        partial(_new_backend, timeout=timedelta(seconds=config.timeout_s), device=device),
        lambda warning, text: choices.log(logging.WARNING if warning else logging.INFO, "%s", text),
        waits=waits, **facts)
    _used.append(backends)
    collectives.probe, collectives.backends = probe, backends
    return collectives


def end_collectives(collectives):
    """Ends the threads that work for collectives of ``make_collectives`` that are no longer used. Local."""
    collectives.all_left()
    backends = getattr(collectives, "backends", None)  # one rank has none
    if backends is not None:
        _end_backends(backends)


def _facts(device):
    """The facts about torch and this rank's device on which the choice of transports depends."""
    return {"on_gpu": device.type == "cuda", "has_nccl": dist.is_nccl_available(), "nccl_runs": _nccl_runs(device),
            "identity": _device_identity(device)}  # fmt: skip


def _device_identity(device):
    if device.type == "cpu":
        return "cpu"
    return f"{device.type} {torch.cuda.get_device_properties(device).uuid}"


def _nccl_runs(device):
    """Whether the default process group has NCCL communicators of this device: new ones take a second, and memory."""
    if device.type != "cuda":
        return False
    with suppress(RuntimeError, AttributeError):  # without NCCL, or within a wrapper of torch's debugging
        backend = dist.group.WORLD._get_backend(device)
        return backend.name() == "nccl" and backend._is_initialized()
    return False


def _new_backend(kind, ranks, timeout, device):
    """A backend "gloo" or "nccl" among ``ranks``; each of them makes the same call. For NCCL among all ranks it is the
    default process group's, where that has one, since each backend takes memory of the GPU. Other NCCL backends end
    with the default group, since their kernels may still run when the host has finished. The user of a gloo backend has
    the only reference to it."""
    if kind == "gloo":
        # Not by new_group(): torch names groups by their present number. Groups end with their users here, so a name
        # would recur, and the store would have the addresses of earlier ranks under it.
        number = next(_gloo_numbers.setdefault(tuple(ranks), itertools.count()))
        name = f"strata/gloo/{'_'.join(map(str, ranks))}/{number}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout=timeout)
    if len(ranks) < dist.get_world_size():
        group = dist.new_group(ranks, backend=kind, timeout=timeout, use_local_synchronization=True)
        return group._get_backend(device)
    with suppress(RuntimeError):
        backend = dist.group.WORLD._get_backend(device)
        if backend.name() == kind:
            return backend
    return dist.new_group(backend=kind, timeout=timeout)._get_backend(device)


@contextmanager
def notifying_ranks():
    """Context for a rank's work before ``make_collectives``: if the work fails, the other ranks get the error there,
    instead of waiting for a rank that has left."""
    try:
        yield
    except Exception as error:
        rank, world_size = rank_and_world_size()
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            _C.tell_failure(store, rank, world_size, str(error), _FAREWELL_S)
        raise


@contextmanager
def agree_after(collectives, what):
    """Context. Collective. An exception inside, on any rank, becomes an error on every rank that names the first
    rank that failed, so that none waits for a rank that has left. The work inside must call no collective.

    The error is a strata.Error of the class that the first failed rank had; a rank that failed otherwise (a TypeError)
    raises its own exception. ``what`` names the work in messages: "opening the checkpoint"."""
    kind = message = ""
    own = None
    try:
        yield
    except _C.CommError:
        raise
    except Exception as error:
        own = error
        kind, message = type(error).__name__, str(error) or type(error).__name__
        if not isinstance(error, _C.Error):
            message = f"{kind}: {message}"
    try:
        _C.agree_on_outcome(collectives, what, kind, message)
    except _C.Error as agreed:
        if own is not None and not isinstance(own, _C.Error):
            raise own from agreed
        raise
