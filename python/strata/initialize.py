"""``strata.initialize``: from a model and a configuration to an engine."""

import json
import logging
import os

import torch

from . import _C
from .checkpoint.supported_transformers import is_transformers_model, unsupported
from .config_source import read_config, require_monitors, shown
from .engine import Engine
from .model.leaves import mark_leaves_of
from .model.model_input import ModelTree
from .model.ownership import require_values
from .model.placement import choose_device
from .optimizer import ShardedOptimizer, optimizer_from_config, wrap_torch_optimizer
from .rank_logging import show_logs
from .ranks.runtime import (
    init_distributed, make_collectives, rank_and_world_size, require_group, notifying_ranks, agree_after,
)
from .schedule import schedule_from_config

logger = logging.getLogger("strata")


def parse_config(config, world_size=None):
    """A _C.Config with complete batch sizes.

    Args:
        config: as for ``read_config``.
        world_size: None: that of the default process group.
    """
    if config is None:
        raise _C.ConfigError("initialize() needs a configuration: pass config=<dict, path or JSON text>")
    parsed = read_config(config)
    parsed.complete_batch(rank_and_world_size()[1] if world_size is None else world_size)
    return parsed


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """Puts ``model`` under the engine. Collective: every rank calls it with the same model.

    The signature is DeepSpeed's. The engine takes over the model's parameters: at stage 3 they are empty
    (``numel() == 0``) except while they are used. Every rank gets rank 0's values.

    Args:
        args: a namespace whose ``deepspeed_config`` is used when ``config`` is not given.
        model: a ``torch.nn.Module``, on the CPU or on one GPU. It trains on the GPU of this rank (LOCAL_RANK)
            where there is one, unless ``strata.device`` of the configuration says otherwise; parameters go
            there shard by shard, buffers whole.
        optimizer: None (the configuration's), a ``torch.optim.Optimizer`` over the model's parameters, or a callable
            that makes one from parameters. The engine's kernel computes AdamW and Adam, torch's or of
            ``strata.ops.adam``. Any other optimizer that updates element by element runs unchanged on the fp32
            shards; this call tries whether it does. Others (Adafactor, Muon, LAMB) run on whole parameters at stage 0,
            or on one rank.
        model_parameters: the parameters or param groups of the configuration's optimizer; all trainable parameters
            when None.
        training_data: a ``torch.utils.data.Dataset``; ``dataloader`` loads it.
        lr_scheduler: None (the configuration's), a scheduler, or a callable that makes one from the
            optimizer. ``engine.step()`` steps it.
        dist_init_required: False: the script itself has made torch's default process group.
        collate_fn: of the dataloader.
        config: dict, path or JSON text (docs/CONFIG.md).
        mpu, mesh_param, distributed_port: must be None; shard groups are the configuration's (``mics_shard_size``,
            ``zero_hpz_partition_size``).

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); the last three are None where there is none. The engine and its
        memory stay until ``engine.destroy()``, or until no reference to the engine and to the model is left.

    Raises:
        ConfigError: the configuration is wrong, or ranks have different models or configurations.
        UsageError: the model's parameters are empty since their engine was destroyed or dropped; the optimizer cannot
            run at this stage.
        CommError: another rank did not call ``initialize`` in time, or ended.
        OutOfMemoryError: the shards do not fit.
    """
    return initialize_as(
        Engine, model, _find_config(args, config, config_params), optimizer, model_parameters, training_data,
        lr_scheduler, dist_init_required, collate_fn, mpu, mesh_param,
    )


def initialize_as(
    engine_class,
    model,
    config,
    optimizer,
    model_parameters,
    training_data,
    lr_scheduler,
    dist_init_required,
    collate_fn,
    mpu=None,
    mesh_param=None,
):
    """``initialize`` with an engine of ``engine_class``, a subclass of ``Engine``."""
    if model is None:
        raise _C.UsageError("initialize() needs a model: pass model=<torch.nn.Module>")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise _C.UsageError(f"initialize({name}=...) is not supported: leave it out; shard groups are named in "
                                "the configuration (zero_optimization.mics_shard_size)")
    from .views.start_up import StartUp  # not at `import strata`, which every script waits for
    show_logs()
    with StartUp() as start_up:
        with start_up.phase("connect"):
            if dist_init_required is False:
                require_group()
            else:
                init_distributed()
            parsed, runtime, tree = prepare(config, model)
            collectives = make_collectives(parsed, runtime.device, runtime.host_waits)
        assembled = assemble(
            tree, parsed, collectives, runtime, optimizer, model_parameters, training_data, lr_scheduler, collate_fn,
            start_up, engine_class=engine_class,
        )
        start_up.finish(assembled[0])
        return assembled


def prepare(config, model):
    """(_C.Config, _C.Runtime, ModelTree) of this rank, for ``make_collectives`` and ``assemble``.

    Args:
        config: as for ``initialize``.
        model: a ``torch.nn.Module`` whose parameters have their values.
    """
    from .views.start_up import require_writable_files

    rank, world_size = rank_and_world_size()
    with notifying_ranks():
        parsed = parse_config(config)
        show_logs(shown(parsed, "log_level"))
        require_writable_files(parsed, rank)
        require_monitors(parsed, rank)
        tree = ModelTree(model)
        require_values(tree.parameters)
        runtime = _C.Runtime(choose_device(parsed, tree), parsed.threads, world_size)
        if _comes_from_the_host(tree, runtime.device):
            runtime.expect_values()
        return parsed, runtime, tree


def _comes_from_the_host(tree, device):
    first = tree.parameters[:1]  # choose_device has seen that all are where one is
    return device.type != "cpu" and any(parameter.device.type == "cpu" for _, parameter in first)


def assemble(
    tree,
    config,
    collectives,
    runtime,
    optimizer,
    model_parameters,
    training_data,
    lr_scheduler,
    collate_fn,
    start_up,
    born_flat=None,
    engine_class=Engine,
):
    """Makes the result of ``initialize``, once the configuration is read and the ranks are connected.

    Args:
        tree: the ModelTree of the model.
        config: a _C.Config.
        collectives: a _C.Collectives.
        runtime: a _C.Runtime, of ``prepare``.
        start_up: the StartUp that counts this start-up's phases.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded.
        engine_class: of the engine.
        The others are ``initialize``'s.
    """
    cut_parameters = _tiling(config, runtime.device, collectives, tree)
    try:
        with start_up.phase("meet"), agree_after(collectives, "making the optimizer"), start_up.phase("make optimizer"):
            config.require_for_training(optimizer is not None, lr_scheduler is not None)
            sharded_optimizer, rule = make_optimizer(config, tree, optimizer, model_parameters)
            if rule == "external":
                from .client_optimizer import choose_parts  # only for an optimizer of the script's

                choose_parts(sharded_optimizer, config, collectives.world_size, torch.device(runtime.device))
            monitor = _monitor(config, collectives.rank)
            cut_parameters(born_flat)
        progress = start_up.progress(collectives.rank, collectives.world_size)
        with start_up.phase("make engine"):
            runtime = runtime.joined(collectives)
            engine = engine_class(tree, config, sharded_optimizer, rule, collectives, runtime, born_flat, progress)
            start_up.core = engine.core
    except BaseException:
        if tree.cut is not None:
            tree.cut.undo()
        raise
    if sharded_optimizer is not None:
        sharded_optimizer.bind(engine)
    engine.lr_scheduler = _make_scheduler(config, sharded_optimizer, lr_scheduler)
    mark_leaves_of(tree.model, engine._section("zero_optimization.leaf_module"))
    engine.collate_fn = collate_fn
    engine.training_dataloader = engine.deepspeed_io(training_data) if training_data is not None else None
    _watch_steps(engine, config, monitor)
    _log_hints(config, engine)
    return engine, sharded_optimizer, engine.training_dataloader, engine.lr_scheduler


def _monitor(config, rank):
    """The ``Monitor`` of a _C.Config; None where the configuration asks for nothing that a rank shows."""
    if not config.shown_given:
        return None
    from .monitoring.monitor import Monitor  # not in every script

    return Monitor(config, rank)


def _watch_steps(engine, config, monitor):
    if monitor is not None or config.steps_per_print:
        from .monitoring.watching import watch_steps

        engine.monitor = engine.monitor if monitor is None else monitor
        engine._watching = watch_steps(engine, config, engine.monitor)


def _tiling(config, device, collectives, tree):
    """A function, born_flat -> None, that cuts the parameters that are too large to gather. Collective on GPUs."""
    if config.stage != 3 and device.type != "cuda":
        return lambda born_flat: None
    from .tiles.budget import Budget, cut_parameters  # not at `import strata`

    budget = Budget.of_rank(config, device, collectives, tree)
    return lambda born_flat: cut_parameters(tree, config, budget, born_flat)


def _find_config(args, config, config_params):
    for candidate in (config, config_params, getattr(args, "deepspeed_config", None)):
        if candidate is not None:
            return candidate
    return None


def make_optimizer(config, tree, optimizer, model_parameters):
    """(ShardedOptimizer or None, rule). ``tree`` is the model's ModelTree, the last two are ``initialize``'s."""
    parameters = model_parameters
    if parameters is None:
        parameters = [p for _, p in tree.parameters if p.requires_grad]
    parameters = list(parameters)
    if optimizer is None:
        sharded, rule = optimizer_from_config(config, parameters)
        if sharded is not None:
            sharded.takes_unfrozen = model_parameters is None
        return sharded, rule
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise _C.UsageError(
                "optimizer must be a torch.optim.Optimizer or a callable that makes one from parameters; "
                f"found {type(optimizer).__name__}"
            )
        optimizer = optimizer(parameters)
    if isinstance(optimizer, ShardedOptimizer):
        raise _C.UsageError("this optimizer belongs to another engine; make a new one from the model's parameters")
    return wrap_torch_optimizer(optimizer)


def _make_scheduler(config, optimizer, lr_scheduler):
    if lr_scheduler is not None:
        if hasattr(lr_scheduler, "step"):
            return lr_scheduler
        return lr_scheduler(optimizer)
    if config.torch_scheduler is not None and optimizer is not None:
        name, params = config.torch_scheduler
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **json.loads(params))
    if config.has_scheduler and optimizer is not None:
        return schedule_from_config(config, optimizer)
    return None


def _log_hints(config, engine):
    if engine.log_level() is not None and not os.environ.get("STRATA_LOG_LEVEL"):
        logger.setLevel(engine.log_level().upper())
    if engine.global_rank != 0:
        return
    logger.info("stage %d, %s, on %s, world size %d over %s", config.stage,
                config.dtype or "the parameters' own dtypes", engine.device, engine.world_size, engine.collectives_name)
    problem = unsupported() if is_transformers_model(engine.module) else None
    if problem is not None:
        logger.warning("save_pretrained and load_weights will refuse this model: %s", problem)
    _list(logging.WARNING, "settings without effect that ask for memory or output:",
          [(path, reason) for path, reason in config.hints if path in config.missed])
    _list(logging.INFO, "accepted settings without effect:",
          [(path, reason) for path, reason in config.hints if path not in config.missed])
    if shown(config, "dump_state"):
        logger.info("every setting that has an effect:\n%s", config.digest().rstrip())


def _list(level, what, hints):
    if hints:
        logger.log(level, "%s%s", what, "".join(f"\n  {path}: {reason}" for path, reason in hints))
