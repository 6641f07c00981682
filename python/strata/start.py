"""``strata.initialize``: from a model and a configuration to an engine."""

import json
import logging
import os
import weakref
from contextlib import contextmanager

import torch

from . import _C
from .checkpoint.supported_transformers import is_transformers_model, unsupported
from .config_source import read_config, shown
from .engine import Engine
from .model.compiling import compiler_of, require_compilable
from .model.leaves import mark_leaves_of
from .model.model_input import ModelTree, find_device, make_current
from .model.parameter import require_values
from .optimizer import ShardedOptimizer, optimizer_from_config, wrap_torch_optimizer
from .rank_logging import logger, show_logs
from .ranks.runtime import (agree_after, init_distributed, make_collectives, notifying_ranks, rank_and_world_size,
                            require_group)
from .schedule import schedule_from_config
from .sequence.groups import initialize_sequence_parallel
from .tiles.cutting import Budget, cut_parameters
from .views.start_up import StartUpClock, require_writable_files


def parse_config(config, world_size=None, mpu=None):
    """A _C.Config with complete batch sizes, of what ``read_config`` takes. ``world_size``: None: that of the group.
    ``mpu``: ``initialize``'s, whose size of sequence parallelism the configuration may leave out."""
    if config is None:
        raise _C.ConfigError("initialize() needs a configuration: pass config=<dict, path or JSON text>")
    parsed = read_config(config)
    if mpu is not None:
        size, of_mpu = parsed.sequence_parallel, mpu.get_sequence_parallel_world_size()
        if size not in (1, of_mpu):
            raise _C.ConfigError(f"strata.sequence_parallel.size: {size}, and the mpu has {of_mpu}; write one of them")
        parsed.sequence_parallel = of_mpu
    parsed.complete_batch(rank_and_world_size()[1] if world_size is None else world_size)
    return parsed


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               distributed_port=None, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
               config_params=None):
    """Puts ``model`` under the engine. Collective: every rank calls it with the same model.

    The signature is DeepSpeed's. The engine takes over the model's parameters: at stage 3 they are empty
    (``numel() == 0``) except while they are used. Every rank gets rank 0's values.

    Args:
        args: a namespace whose ``deepspeed_config`` is used when ``config`` is not given.
        model: a ``torch.nn.Module``, on the CPU or on one GPU. It trains on the GPU of this rank (LOCAL_RANK)
            where there is one, unless ``strata.device`` of the configuration says otherwise; parameters go
            there shard by shard, buffers whole.
        optimizer: None (the configuration's), a ``torch.optim.Optimizer`` over the model's parameters, or a callable
            that makes one from parameters. The engine's kernels compute AdamW and Adam of torch and
            ``strata.ops.adam``, Lion of ``strata.ops.lion``, and these three of bitsandbytes and torchao, in 8 bits,
            too; and Muon of torch and ``strata.ops.muon``. Any other optimizer that updates element by element runs
            unchanged on the fp32 shards; this call tries whether it does. Others (Adafactor, LAMB) run on whole
            parameters, each on the rank that owns it; one that looks at all parameters at once (Prodigy) at stage 0
            alone.
        model_parameters: the parameters or param groups of the configuration's optimizer; all trainable parameters
            when None.
        training_data: a ``torch.utils.data.Dataset``; ``dataloader`` loads it.
        lr_scheduler: None (the configuration's), a scheduler, or a callable that makes one from the
            optimizer. ``engine.step()`` steps it.
        dist_init_required: False: the script itself has made torch's default process group.
        collate_fn: of the dataloader.
        config: dict, path or JSON text (docs/CONFIG.md).
        mpu: None, or what has sequence parallelism's size, DeepSpeed's ``parallel_state_sp``: then the script's loss is
            of whole rows already.
        mesh_param, distributed_port: must be None; shard groups are the configuration's (``mics_shard_size``,
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
    given = (config, config_params, getattr(args, "deepspeed_config", None))
    config = next((one for one in given if one is not None), None)
    return initialize_as(Engine, model, mpu, mesh_param, config, optimizer, model_parameters, training_data,
                         lr_scheduler, collate_fn, dist_init_required)


def initialize_as(engine_class, model, mpu, mesh_param, config, *others):
    """``initialize`` with an engine of ``engine_class``, a subclass of ``Engine``; ``others`` are ``StartUp``'s."""
    if model is None:
        raise _C.UsageError("initialize() needs a model: pass model=<torch.nn.Module>")
    if mesh_param is not None or not hasattr(mpu, "get_sequence_parallel_world_size") and mpu is not None:
        raise _C.UsageError("initialize() takes no mesh_param, and an mpu of sequence parallelism alone: leave them "
                            "out; strata.sequence_parallel.size and zero_optimization.mics_shard_size make groups")
    return StartUp(config, model, *others, engine_class=engine_class, mpu=mpu).run()


class StartUp:
    """One start of an engine on this rank, with ``initialize``'s arguments. ``run()`` is the list of its phases.
    ``load_pretrained`` has a subclass, which builds the model. ``clock``: the ``StartUpClock`` that counts the phases.
    ``config``: from ``read_config()`` on the _C.Config. ``from_files``: {id(parameter): full shape} of parameters that
    are empty until they are loaded; None: there is none."""

    def __init__(self, config, model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn,
                 dist_init_required=None, engine_class=Engine, mpu=None):  # fmt: skip
        self.config, self.model, self.optimizer, self.model_parameters = config, model, optimizer, model_parameters
        self.training_data, self.lr_scheduler, self.collate_fn = training_data, lr_scheduler, collate_fn
        self.dist_init_required, self.engine_class = dist_init_required, engine_class
        self.from_files, self.mpu = None, mpu

    def run(self):
        """(engine, optimizer, dataloader, lr_scheduler), as ``initialize`` returns them. Collective."""
        show_logs()
        with StartUpClock() as self.clock:
            with self.clock.phase("connect"):
                self.connect()
                with notifying_ranks():
                    self.read_config()
                    self.place()
                self.collectives = make_collectives(self.config, self.runtime.device, self.runtime.host_waits)
            self.build()
            try:
                budget = Budget.of_rank(self.config, self.runtime.device, self.collectives, self.tree)
                with self.agreed("making the optimizer"), self.clock.phase("make optimizer"):
                    self.make_optimizer()
                    self.monitor = None
                    if self.config.shown_given:
                        from .monitoring.monitor import Monitor  # only where a rank's output is asked for

                        self.monitor = Monitor(self.config, self.collectives.rank)
                    cut_parameters(self.tree, self.config, budget, self.from_files)
                    for path, module, _ in self.tree.modules:
                        require_compilable(path, module, compiler_of(module), self.tree.cut, self.config.cuda_graphs)
                with self.clock.phase("make engine"):
                    self.make_engine()
            except BaseException:
                if self.tree.cut is not None:
                    self.tree.cut.undo()
                raise
            self.schedule()
            self.load_data()
            self.watch_steps()
            _log_hints(self.config, self.engine)
            self.finish()
        return self.engine, self.sharded_optimizer, self.engine.training_dataloader, self.engine.lr_scheduler

    def connect(self):
        """Makes, or requires, torch's default process group."""
        if self.dist_init_required is False:
            require_group()
        else:
            init_distributed()

    def read_config(self):
        """Reads the configuration, and checks that its files and monitors can be opened."""
        self.config, rank = self.parsed_config(), rank_and_world_size()[0]
        show_logs(shown(self.config, "log_level"))
        require_writable_files(self.config, rank)
        if rank == 0 and self.config.shown_given:
            from .monitoring.monitor import require_packages  # only where a rank's output is asked for

            require_packages(self.config)

    def parsed_config(self):
        """The _C.Config, with complete batch sizes."""
        return parse_config(self.config, mpu=self.mpu)

    def place(self):
        """Chooses the device, and opens it."""
        self.tree = ModelTree(self.model)
        require_values(self.tree.parameters)
        device = make_current(find_device(self.config, self.tree))
        self.runtime = _C.Runtime(device, self.config.threads, rank_and_world_size()[1])
        first = self.tree.parameters[:1]  # find_device has seen that all are where one is
        if device.type != "cpu" and any(parameter.device.type == "cpu" for _, parameter in first):
            self.runtime.expect_values()

    def build(self):
        """Builds the model, where there is none."""

    @contextmanager
    def agreed(self, what):
        """Context, in the phase "meet", of this rank's work ``what``, whose outcome the ranks agree on."""
        with self.clock.phase("meet"), agree_after(self.collectives, what):
            yield

    def make_optimizer(self):
        """Takes over the script's optimizer, or the configuration's."""
        self.config.require_for_training(self.optimizer is not None, self.lr_scheduler is not None)
        self.sharded_optimizer, self.rule = make_optimizer(
            self.config, self.tree, self.optimizer, self.model_parameters)
        if self.rule == "external":
            from .client_optimizer import choose_parts  # only for an optimizer of the script's

            self.rule = choose_parts(self.sharded_optimizer, self.config, self.collectives.world_size,
                                     torch.device(self.runtime.device))

    def make_engine(self):
        """Makes the engine, which takes the model over."""
        if self.config.sequence_parallel > 1:
            from .sequence.attention import SequenceAttention, require_possible  # not in every script

            require_possible(self.tree.model, self.config.sequence_parallel)  # the model is the script's until here
        runtime, collectives = self.runtime.joined(self.collectives), self.collectives
        self.engine = self.engine_class(self.tree, self.config, self.sharded_optimizer, self.rule, collectives, runtime,
                                        self.from_files, self.clock.progress(collectives.rank, collectives.world_size))
        self.clock.core = self.engine.core
        if self.config.sequence_parallel > 1:
            group = initialize_sequence_parallel(self.config.sequence_parallel)
            attention = SequenceAttention(self.engine.module, group, gathers_loss=self.mpu is None)
            self.engine.sequence, group.core = group, weakref.ref(self.engine.core)
            self.engine._undo.append(attention.undo)

    def schedule(self):
        """Binds the optimizer to the engine, and makes the scheduler."""
        optimizer, scheduler, config = self.sharded_optimizer, self.lr_scheduler, self.config
        if optimizer is not None:
            optimizer.bind(self.engine)
        if scheduler is not None:
            scheduler = scheduler if hasattr(scheduler, "step") else scheduler(optimizer)
        elif config.torch_scheduler is not None and optimizer is not None:
            name, params = config.torch_scheduler
            scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **json.loads(params))
        elif config.has_scheduler and optimizer is not None:
            scheduler = schedule_from_config(config, optimizer)
        self.engine.lr_scheduler = scheduler

    def load_data(self):
        """Marks leaf modules, and makes the loader of the script's data."""
        engine = self.engine
        mark_leaves_of(engine.module, engine._section("zero_optimization.leaf_module"))
        engine.collate_fn = self.collate_fn
        engine.training_dataloader = None if self.training_data is None else engine.deepspeed_io(self.training_data)

    def watch_steps(self):
        """Begins the output about steps that the configuration asks for."""
        if self.monitor is not None or self.config.steps_per_print:
            from .monitoring.watching import watch_steps

            self.engine.monitor = self.engine.monitor if self.monitor is None else self.monitor
            self.engine._watching = watch_steps(self.engine, self.config, self.engine.monitor)

    def finish(self):
        """Reports the start-up. Collective."""
        self.clock.finish(self.engine)


def make_optimizer(config, tree, optimizer, model_parameters):
    """(ShardedOptimizer or None, rule). ``tree`` is the model's ModelTree, the last two are ``initialize``'s."""
    trainable = (p for _, p in tree.parameters if p.requires_grad)
    parameters = list(trainable if model_parameters is None else model_parameters)
    if optimizer is None:
        sharded, rule = optimizer_from_config(config, parameters, tree)
        if sharded is not None:
            sharded.takes_unfrozen = model_parameters is None
        return sharded, rule
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise _C.UsageError("optimizer must be a torch.optim.Optimizer or a callable that makes one from "
                                f"parameters; found {type(optimizer).__name__}")
        optimizer = optimizer(parameters)
    if isinstance(optimizer, ShardedOptimizer):
        raise _C.UsageError("this optimizer belongs to another engine; make a new one from the model's parameters")
    sharded, rule = wrap_torch_optimizer(optimizer)
    if rule == "external" and config.states_8bit:
        raise _C.UsageError(f"strata.optimizer_states: {type(optimizer).__name__} keeps its states itself, and 8 bits "
                            "are for AdamW, Adam and Lion; give one of these, or remove the key; found \"8bit\"")
    return sharded, rule


def _log_hints(config, engine):
    """Logs on rank 0 the choices of the start, and the settings without effect."""
    if engine.log_level() is not None and not os.environ.get("STRATA_LOG_LEVEL"):
        logger.setLevel(engine.log_level().upper())
    if engine.global_rank != 0:
        return
    logger.info("stage %d, %s, on %s, world size %d over %s", config.stage,
                config.dtype or "the parameters' own dtypes", engine.device, engine.world_size, engine.collectives_name)
    problem = unsupported() if is_transformers_model(engine.module) else None
    if problem is not None:
        logger.warning("save_pretrained and load_weights will refuse this model: %s", problem)
    for level, are_missed, what in ((logging.WARNING, True, "settings without effect that ask for memory or output:"),
                                    (logging.INFO, False, "accepted settings without effect:")):
        hints = [f"\n  {path}: {reason}" for path, reason, missed in config.hints if missed == are_missed]
        if hints:
            logger.log(level, "%s%s", what, "".join(hints))
    if shown(config, "dump_state"):
        logger.info("every setting that has an effect:\n%s", config.digest().rstrip())
