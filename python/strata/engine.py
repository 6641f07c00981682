"""The engine object that a training script calls. C++ takes all of its decisions."""

import functools
import weakref
from contextlib import nullcontext
from operator import attrgetter

import torch

from . import _C
from .batches import Batches
from .checkpoint.engine_checkpoints import EngineCheckpoints
from .clocks import ThroughputTimer, Timers
from .engine_names import EngineNames
from .engine_settings import EngineSettings
from .engine_weights import EngineWeights, StateOffload
from .model.compiling import check_at_first_forward, mark_steps
from .model.interception import intercept, intercept_arguments
from .model.model_input import describe_modules, describe_parameters, move_buffers
from .model.parameter import release_ownership, discard_values, take_ownership
from .model.tiles import owned_parameters, tile_of, tiles_of
from .sequence.spared_memory import SparedMemory
from .optimizer import groups_of, log_left_out
from .rank_logging import logger
from .ranks.departure import record_error, unwatch, watch
from .ranks.runtime import end_collectives
from .schedule import Advance


class Engine(EngineCheckpoints, EngineSettings, Batches, EngineNames, EngineWeights, StateOffload, torch.nn.Module):
    """A model under the engine; ``strata.initialize`` makes it. Its base classes are its parts, each with the calls of
    one kind.

    Attributes:
        module: the user's model, the same object.
        optimizer: ``ShardedOptimizer`` or None.
        lr_scheduler: stepped by ``step()`` after every applied update; or None.
        core: the C++ model (_C.ShardedModel).
        known: [``strata.model.tiles.OwnedParameter``], the model's parameters, each with its parts in ``core``.
        coalesces: whether a ``coalesce_grad_reduction()`` is open.
        is_compiled: whether ``compile()`` was called.
        training_dataloader: of ``training_data``; None without it.
        sequence: the ``strata.sequence.groups.SequenceGroup`` of ranks that share rows; None: there is none.
        collate_fn: the argument of ``initialize``.
        timers, tput_timer: ``Timers`` and ``ThroughputTimer`` of ``strata.clocks``.
        init_report: the report of the start-up, a dict, the same on every rank (docs/OBSERVING.md).
    """

    coalesces = is_compiled = False
    sequence = None
    training_dataloader = collate_fn = None
    _left_out = ()  # trainable parameters that are in no param group; autograd makes their .grad

    def __init__(self, tree, config, optimizer, rule, collectives, runtime, from_files=None, progress=None):
        super().__init__(config)
        self.module = tree.model
        self.optimizer = optimizer
        self.lr_scheduler = None
        self._advance = None  # of the scheduler, by the last step
        self.init_report = None
        self._at_boundary = False  # whether the last call of step() was one
        self._unapplied = 0  # micro-steps since the last boundary
        self._steps_by = "engine"  # the script calls the step() of "engine" or of "optimizer"
        self._ended_by = None  # which of the two ended the last micro-step
        self._trace = config.trace  # None: there is none, or it is over
        self._collectives = collectives
        groups = groups_of(optimizer)
        parameters = describe_parameters(tree, groups, from_files, getattr(optimizer, "takes_unfrozen", False),
                                         getattr(optimizer, "rules", None))
        if rule != "none":
            self._left_out = log_left_out(parameters, groups, collectives.rank)
        self.core = _C.ShardedModel(parameters, describe_modules(tree), config, rule, runtime, "engine", progress)
        move_buffers(tree, runtime.device)
        self._described = [(*entry[:5], None, 0, *entry[7:]) for entry in parameters]  # earlier owners may go
        self.known = owned_parameters(self._described)
        self._cut = tree.cut
        for index, (_, parameter, *_) in enumerate(parameters):
            if tile_of(parameter)[1] is not None:
                tile_of(parameter)[1].bind(self.core, index)
        if self._cut is not None:
            self._cut.commit()
            for known in self.known:
                if tiles_of(known.parameter) is not None:
                    _C.show_tiled(self.core, known.parameter, known.shape, [part.index for part in known.parts])
        take_ownership(self.core, parameters, config.stage)
        modules = [module for _, module, _ in tree.modules]
        self._scope_modules = [modules[index] for index in self.core.scopes()]
        device, floating = self.device if config.move_inputs else None, torch.float16 if config.cast_inputs else None
        spared = SparedMemory(modules, config)
        self._undo = [intercept(self.core, modules), intercept_arguments(tree.model, device, floating),
                      check_at_first_forward(self), *([mark_steps(self)] if config.cuda_graphs else [])]
        self._undo = [spared.install(self.core, self.device), *self._undo, spared.undo]
        self.timers, self.tput_timer = Timers(self.device), ThroughputTimer()
        self._watching = None  # a StepWatch, where this rank shows something of its steps
        self.core.free_originals()
        watch(self.core, weakref.ref(self))

    def forward(self, *args, **kwargs):
        """The model's forward; ``engine.module(...)`` trains as well. It copies tensors of the host among its
        arguments, also within tuples, lists, dicts and dataclasses, to ``device`` (``strata.move_inputs``);
        ``engine.module(...)`` and ``generate`` do the same. Under ``fp16.auto_cast`` it casts floating ones to fp16.
        UsageError for a tensor on another GPU."""
        self.core.begin_forward()
        try:
            if self._watching is None:
                return self.module(*args, **kwargs)
            return self._watching.forward(self.module, args, kwargs)
        except Exception as error:
            record_error(error)
            raise

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Runs autograd from ``loss`` and reduces gradients, as ``loss.backward()`` does. Returns the loss, divided by
        the accumulation steps where ``scale_wrt_gas`` is True; not multiplied by the loss scale. UsageError without a
        forward before, and for a loss that depends on no parameter. CommError where another rank ended, or called
        another collective.

        Args:
            loss: floating tensor of one element, shape [], from this engine's forward.
            retain_graph: as in ``torch.autograd.backward``.
            scale_wrt_gas: divide by the accumulation steps.
        """
        self.core.begin_backward(self.optimizer.scalars() if self._config.updates_in_backward else [])
        try:
            with nullcontext() if self._watching is None else self._watching.backward(loss, scale_wrt_gas):
                self.core.factored(loss, scale_wrt_gas).backward(retain_graph=retain_graph)
            self.core.end_backward()
        except BaseException as error:
            self.core.abandon_backward()
            record_error(error)
            if type(error) is RuntimeError:  # an exception of a hook loses its class on its way through autograd
                self._collectives.require_usable()
            raise
        steps = self.core.accumulation_steps
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    def scale(self, loss):
        """The tensor to call ``backward()`` on: ``loss`` times the loss scale in fp16, else ``loss`` itself. Gradients
        are divided by the accumulation steps as they come, so the loss is not. UsageError in fp16 for a loss that
        requires no gradient."""
        return self.core.scale(loss)

    def step(self, lr_kwargs=None):
        """Ends a micro-step; at an accumulation boundary updates the weights and steps the scheduler. Does nothing
        where ``optimizer.step()`` was called since the last backward pass. UsageError without a backward pass since the
        last step, and within ``coalesce_grad_reduction()``. NumericsError in fp32 and bf16, where gradients were not
        finite in more steps in a row than ``strata.max_skipped_steps``; on a GPU the next ``step()`` or save raises it,
        since this one does not wait."""
        if self.coalesces:
            raise _C.UsageError("step() was called within coalesce_grad_reduction(), whose gradients are not reduced "
                                "yet; call it after the block")
        if self.core.ends_step():
            self._settle_schedule()
            self._settle_masters()
            if self._watching is not None:
                self._watching.step_begins()
        try:
            result = self.core.step(self.optimizer.scalars() if self.optimizer is not None else [])
        except _C.MissingBackward:
            # Fine where step() of the other one, engine or optimizer, has done the work, and before the first gradients
            # for an optimizer.
            if self._ended_by == self._steps_by or (self._ended_by is None and self._steps_by == "engine"):
                raise
            return
        self._at_boundary, self._ended_by = False, self._steps_by
        self._unapplied = self._unapplied + 1 if result is None else 0
        if result is None:
            return
        self._at_boundary = True
        if self._config.async_checkpoints:
            self.checkpoint_saver()  # it begins to allocate its memory, beside training
        self.tput_timer.step_ended(self.train_batch_size())
        applied, warning = result  # None: the device has not decided yet
        if warning and self.global_rank == 0:
            logger.warning("%s", warning)
        if self._trace is not None:
            self._log_trace()
        self.optimizer.overflow = applied is False
        self.optimizer._opt_called = True  # torch's schedulers look whether the optimizer went first
        if applied is not False and self.lr_scheduler is not None:
            self._advance = Advance(self.lr_scheduler, self.optimizer, lr_kwargs or {}, can_be_undone=applied is None)
        if self._watching is not None:
            self._watching.step_ended(applied)

    def _settle_masters(self):
        """Called before masters change or are saved: takes over the masters of a state that the script has loaded."""
        if getattr(self.optimizer, "owed_masters", None):
            from .local_states import settle_masters  # not before the first use

            settle_masters(self.optimizer, self.core)

    def step_by_optimizer(self):
        """The work of ``optimizer.step()``."""
        self._steps_by = "optimizer"
        try:
            self.step()
        finally:
            self._steps_by = "engine"

    def _settle_schedule(self):
        """Takes a step of the scheduler back where the device has skipped the update."""
        advance, self._advance = self._advance, None
        if advance is not None and advance.can_be_undone and not self.core.last_step_applied:
            advance.undo()

    def _log_trace(self):
        over, problem = self.core.trace_state()
        if not over:
            return
        path, self._trace = self._trace, None
        if problem:
            logger.warning("strata.trace: '%s' could not be written: %s", path, problem)
        elif self.global_rank == 0:
            logger.info("the timeline of steps is in '%s'; open it with ui.perfetto.dev", path)

    def end_watching(self, wait=True):
        """Shows and writes the remaining times and metrics, with ``wait`` also those that the device has not computed
        yet; a second call does nothing."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close(wait)

    def zero_grad(self, set_to_none=True):
        """Drops the gradients of all micro-steps of this step, as in torch: reduced or not, in every tier. After
        ``step()`` there are none. The call acts on this rank; every rank must drop gradients that were reduced. With
        ``set_to_none=False`` the gradients become zeroes, and ``step()`` still updates with them. UsageError within a
        backward pass. ``step()`` raises it where ranks have dropped different gradients."""
        _C.zero_gradients(self.core, not set_to_none)
        for parameter in self._left_out:
            parameter.grad = None

    @functools.cached_property
    def monitor(self):
        """The ``Monitor`` of ``strata.monitoring.monitor``; one that is off where the configuration names none."""
        from .monitoring.monitor import Monitor  # not in every script

        return Monitor()

    def get_global_grad_norm(self):
        """float: L2 norm over all ranks at the last boundary, before clipping; None before the first. Waits
        for the device."""
        return self.core.grad_norm

    global_steps = property(attrgetter("core.global_steps"),
                            doc="int: accumulation boundaries so far, skipped ones included.")  # fmt: skip
    micro_steps = property(attrgetter("core.micro_steps"), doc="int: calls of ``step()`` so far.")
    global_rank = property(attrgetter("_collectives.rank"), doc="int: this process's rank.")
    world_size = property(attrgetter("_collectives.world_size"), doc="int: number of ranks.")
    collectives_name = property(attrgetter("_collectives.name"), doc='str: "local", "shm", "gloo", "nccl" or "peer".')
    device = property(attrgetter("core.device"), doc="torch.device on which gathered parameters are.")

    @property
    def skipped_steps(self):
        """int: boundaries that were skipped because gradients were not finite. Waits for the device."""
        return self.core.skipped_steps(wait=True)

    def was_step_applied(self):
        """bool: whether the last call of ``step()`` changed the weights. Waits for the device."""
        if not self._at_boundary:
            return False
        self._settle_schedule()
        return self.core.last_step_applied

    def save_pretrained(self, save_directory, max_shard_size="5GB"):
        """``strata.pretrained.save_pretrained``: files for transformers' ``from_pretrained``. Collective, between
        steps."""
        from .checkpoint.saving import save_pretrained  # not before the first save

        save_pretrained(self, save_directory, max_shard_size)

    def destroy(self, keep_values=False):
        """Removes every hook and frees the engine's memory. With ``keep_values`` the model has full parameters of its
        own afterwards (collective at stage 3). Else sharded parameters end empty; parameters that are whole anyway (all
        at stages 0 to 2, and on one rank) keep their values, unless the device has no room for a copy of them beside
        the engine."""
        self.core.end_trace()
        if self._trace is not None:
            self._log_trace()
        self.end_watching()
        failure = None
        try:
            self.wait_for_checkpoint()
        except _C.CommError:
            raise
        except _C.Error as error:  # of the writer: raised when the engine is gone
            failure = error
        self._saver = None
        self.core.destroy(keep_values)
        unwatch(self.core)
        end_collectives(self._collectives)
        for undo in self._undo:
            undo()
        release_ownership(self._described)
        if self._cut is not None:
            discard_values(self._cut.undo())
        if failure is not None:
            raise failure

    def __getattr__(self, name):
        """Names that the engine does not have are the model's (``engine.generate``)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)
