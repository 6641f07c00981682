"""The memory that a training job will need on each device, before it runs: ``strata.memory_forecast``."""

import torch

from . import _C
from .start import make_optimizer, parse_config
from .model.model_input import ModelTree, describe_modules, describe_parameters
from .optimizer import groups_of
from .tiles.cutting import Budget, cut_parameters


def memory_forecast(model, config, world_size, device="cuda", optimizer=None, model_parameters=None,
                    ranks_per_host=None, tier="device", device_memory=None, host_memory=None):
    """{kind: bytes, "total": bytes} that the engine will hold at most on each rank's device, or of another tier.

    The call needs no ranks and no GPU, and a model on the meta device suffices. The engine itself runs for three steps
    on a device without memory, so the numbers follow from its decisions, not from a formula. They do not contain the
    model's activations, its gradients before they reach the engine (all of one block's where it is compiled), and the
    memory of torch, the driver, the collectives and the engine's kernels ("workspace" in
    ``engine.memory_report()``, some bytes a MiB of shard).
    "gradients" are an upper bound: reductions that end early hold less, and so does an order within a block that
    completes units one after the other.

    Args:
        model: a ``torch.nn.Module`` whose parameters have their full shapes, on any device.
        config: dict, path or JSON text, as for ``initialize``.
        world_size: ranks of the job.
        device: "cuda": GPUs; those of one host reach each other's memory. Or "cpu".
        optimizer, model_parameters: as for ``initialize``.
        ranks_per_host: int; None: all ranks are on one host. With the configuration's ``strata.collectives`` it decides
            on the transport of weights and gradients: copies between peers, or NCCL, which hold different memory.
        tier: "device"; "host": memory of the host for offloaded states (pinned where GPUs work on them) and for
            staging, loading and saving checkpoints included; "nvme": space on the drive. All are of one rank.
        device_memory, host_memory: int, bytes of one device, and of one host, whose ranks share it. They count where
            ``strata.placement`` is "auto" and the configuration has no ``strata.device_budget`` or
            ``strata.host_budget``; None: no bound.

    Raises:
        OutOfMemoryError: ``strata.placement`` is "auto", and the model does not fit; names the needed and the given
            bytes.
        ConfigError: the configuration is wrong, or does not suit this number of ranks, or peers on several hosts.
        UsageError: ``initialize`` would refuse the optimizer; the number of ranks, of all or of a host, is below 1.
    """
    if device not in ("cuda", "cpu"):
        raise _C.UsageError(f"memory_forecast(device=...) must be 'cuda' or 'cpu'; found {device!r}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise _C.UsageError(f"memory_forecast(ranks_per_host=...) must be at least 1, or None; found {ranks_per_host}")
    parsed = parse_config(config, world_size)
    tree = ModelTree(model)
    sharded_optimizer, rule = make_optimizer(parsed, tree, optimizer, model_parameters)
    if rule == "external":
        from .client_optimizer import choose_parts  # only for an optimizer of the script's

        here = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
        rule = choose_parts(sharded_optimizer, parsed, world_size, torch.device(here))
    cut_parameters(tree, parsed, Budget.of_job(parsed, device, device_memory))
    try:
        parameters = describe_parameters(tree, groups_of(sharded_optimizer),
                                         rules=getattr(sharded_optimizer, "rules", None))
        modules = describe_modules(tree)
        return _C.forecast_job(parameters, modules, parsed, rule, world_size, device == "cuda", ranks_per_host or 0,
                               tier, device_memory, host_memory)
    finally:
        if tree.cut is not None:
            tree.cut.undo()
