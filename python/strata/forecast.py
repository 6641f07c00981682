"""What training will hold on each device, before there is any: ``strata.memory_forecast``."""

from . import _C
from .initialize import make_optimizer, parse_config
from .model_input import describe_modules, describe_parameters
from .optimizer import groups_of


def memory_forecast(model, config, world_size, device="cuda", optimizer=None, model_parameters=None):
    """{kind: bytes, "total": bytes} that the engine will hold at most on each rank's device.

    Nobody trains, and neither ranks nor GPUs are needed: a model on the meta device will do. The engine itself runs
    for three steps on a device without memory, so this is what it will decide, not a formula. Beside it the device
    holds the model's activations, its gradients before they reach the engine, and what torch, the driver, the
    collectives and the engine's kernels ("workspace" in ``engine.memory_report()``, some bytes a MiB of shard) keep
    for themselves. "gradients" are an upper bound: reductions that end early hold less, and so does an order within a
    block that completes units one after the other.

    Args:
        model: a ``torch.nn.Module`` whose parameters have their full shapes, on any device.
        config: dict, path or JSON text, as for ``initialize``.
        world_size: ranks of the job.
        device: "cuda": GPUs of one host that reach each other's memory; "cpu".
        optimizer, model_parameters: as for ``initialize``.

    Raises:
        ConfigError: the configuration, also where it does not suit so many ranks.
        UsageError: what ``initialize`` would refuse of the optimizer.
    """
    if device not in ("cuda", "cpu"):
        raise _C.UsageError(f"memory_forecast(device=...) must be 'cuda' or 'cpu'; found {device!r}")
    parsed = parse_config(config, world_size)
    sharded_optimizer, rule = make_optimizer(parsed, model, optimizer, model_parameters)
    parameters = describe_parameters(model, groups_of(sharded_optimizer))
    modules, _ = describe_modules(model, parameters)
    return _C.forecast_job(parameters, modules, parsed, rule, world_size, device == "cuda")
