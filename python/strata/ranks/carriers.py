"""What carries weights and gradients between the ranks of a host: copies between their memories (peer) or NCCL, and
not always the same for both."""

import logging
import math
import socket
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from .. import _C

log = logging.getLogger(__name__)

# So much faster must NCCL be, alone, to be taken: its kernels take processors from the model's, copy engines do not.
_NCCL_MUST_BE = 1.5


def require_sensible(config, world_size, group_size, device):
    """Raises ConfigError where strata.gather or strata.reduce ask for what cannot be. On one rank they say nothing.

    Args:
        config: a _C.Config.
        group_size: ranks of a shard group.
    """
    for key in ("gather", "reduce"):
        found = getattr(config, key)
        if found == "auto":
            continue
        if device.type != "cuda":
            raise _C.ConfigError(
                f"strata.{key}: '{found}' is for GPUs, and the model trains on {device}; leave it out, since "
                "strata.collectives chooses on the host"
            )
        if found == "nccl" and world_size > 1 and not dist.is_nccl_available():
            raise _C.ConfigError(f"strata.{key}: this build of torch has no NCCL; write 'peer'. Found 'nccl'")
        if group_size != world_size:
            raise _C.ConfigError(
                f"strata.{key}: for ranks that are one shard group; leave it out, since strata.collectives chooses "
                f"for all groups. Found '{found}' and groups of {group_size} among {world_size} ranks"
            )


def wanted_carriers(config, kind, one_host, device):
    """(of gathers, of reductions), each "peer", "nccl" or "auto"; None where a control plane carries all.

    Args:
        kind: of the configuration's ``collectives``.
        one_host: whether the ranks are on one.
    """
    if kind in ("peer", "nccl"):
        both = kind
    elif device.type == "cpu":
        return None
    else:
        both = "auto" if kind == "auto" and one_host else "nccl"
    return tuple(both if own == "auto" else own for own in (config.gather, config.reduce))


def nccl_runs(device):
    """Whether the default process group has NCCL communicators of this device already: to start some takes about a
    second, and memory of the GPU."""
    if device.type != "cuda":
        return False
    with suppress(RuntimeError, AttributeError):  # without NCCL, or within a wrapper of torch's debugging
        backend = dist.group.WORLD._get_backend(device)
        return backend.name() == "nccl" and backend._is_initialized()
    return False


def join(part, control, config, wanted, device, name, probes):
    """The collectives of ``part`` whose bulk data goes as ``wanted``.

    Where a carrier is "auto", peers are taken as far as they reach each other; a probe compares NCCL with them where
    NCCL runs anyway. The result has the figures of the probe, if there was one, as ``probe``.

    Args:
        part: the ranks, a runtime._Part.
        control: their _C.Collectives of host memory.
        wanted: of ``wanted_carriers``.
        name: of NCCL's part; the same on every rank, and never used again.
        probes: whether NCCL runs already on every rank.

    Errors: ``CommError``, on every rank.
    """
    if "peer" in wanted and not part.one_host:
        raise _C.ConfigError("strata.gather, strata.reduce: 'peer' joins ranks of one host, and these are on several; "
                             "write 'nccl', or leave both out")
    made, without_peers = {}, ""
    if set(wanted) != {"nccl"}:
        try:
            made["peer"] = _C.peer_collectives(control, device, config.timeout_s, part.numbers)
        except _C.CommError as error:
            if "peer" in wanted:
                raise
            without_peers = f"the GPUs do not reach each other's memory: {error}"
            if part.rank == 0:
                log.warning("strata: weights and gradients go through NCCL, since %s", without_peers)
            wanted = ("nccl", "nccl")
    if "nccl" in wanted or (probes and "auto" in wanted):
        try:
            backend = nccl_backend(part, device, config.timeout_s)
        except _C.CommError as error:
            if not without_peers:
                raise
            raise _C.CommError(f"{error}\nNCCL was to carry weights and gradients, since {without_peers}") from error
        made["nccl"] = _C.device_collectives(control, backend, part.store, device, name, "nccl", part.numbers)
    figures = None
    if "auto" in wanted and len(made) == 2:
        began = time.perf_counter()
        figures = {carrier: _C.probe_collectives(of, device, config) for carrier, of in made.items()}
        wanted = choose(wanted, figures)
        if part.rank == 0:
            _log_choice(wanted, figures, time.perf_counter() - began)
    gathers, reductions = ("peer" if own == "auto" else own for own in wanted)
    if gathers == reductions:
        joined = made[gathers]
    else:
        joined = _C.split_collectives(made[gathers], made[reductions])
    joined.probe = figures and {
        carrier: {"gather_s": gather, "reduce_s": reduce} for carrier, (gather, reduce) in figures.items()
    }
    return joined


def choose(wanted, figures):
    """``wanted`` with what is faster in the place of "auto".

    Args:
        figures: {"peer" | "nccl": (seconds of a gather, seconds of a reduction)}; not finite where a rank had no
            memory to measure them. The same on every rank.
    """

    def faster(own, peer, nccl):
        if own != "auto":
            return own
        return "nccl" if math.isfinite(peer) and nccl * _NCCL_MUST_BE < peer else "peer"

    return tuple(faster(*each) for each in zip(wanted, figures["peer"], figures["nccl"]))


def _log_choice(chosen, figures, seconds):
    said = ", ".join(
        f"{carrier} {gather * 1e3:.2f} and {reduce * 1e3:.2f} ms" for carrier, (gather, reduce) in figures.items()
    )
    log.info("strata: gathers go over %s, reductions over %s; a gather of 64 MiB and the reduction of its gradients: "
             "%s (probed in %.0f ms)", *chosen, said, seconds * 1e3)


def nccl_backend(part, device, timeout_s):
    """Of all ranks the NCCL backend of the default process group where it has one, since each takes memory of the
    GPU; else that of a new group. It has carried something when this returns."""
    backend = None
    if part.size == dist.get_world_size():
        with suppress(RuntimeError):
            backend = dist.group.WORLD._get_backend(device)
    if backend is None or backend.name() != "nccl":
        backend = part.new_group("nccl", timeout_s)._get_backend(device)
    try:
        backend.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
        torch.cuda.synchronize(device)
    except Exception as error:
        raise _C.CommError(
            f"rank {dist.get_rank()} on host {socket.gethostname()}: NCCL did not start on {device}: {error}"
        ) from error
    return backend
