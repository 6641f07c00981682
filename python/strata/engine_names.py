"""Names that training scripts and frameworks read on DeepSpeed's engine, beside those that train."""

import gc
import os
from operator import attrgetter

import torch

from . import _C
from .model.compiling import compiler_of, regions_of, require_compilable
from .ops.elementwise import set_value


class EngineNames:
    """The part of ``Engine`` that answers questions about its optimizer, its precision, its ranks and its work."""

    # --- the optimizer and its schedule ---

    def get_lr(self):
        """[float]: the learning rate of each param group, 0.0 for a group without one; [] without an optimizer."""
        return [float(rate or 0.0) for rate in self._of_groups("lr")]

    def set_lr(self, lr):
        """Sets the learning rate of every param group, for the steps from now on; a scheduler overwrites it. UsageError
        where there is no optimizer."""
        if self.optimizer is None:
            raise _C.UsageError("set_lr: this engine has no optimizer; name one in the configuration, or pass one as "
                                "optimizer= to initialize")
        for group in self._groups:
            set_value(group, "lr", lr)

    def get_mom(self):
        """The momentum of each param group: betas, or "momentum" of optimizers that have that."""
        return self._of_groups("momentum" if any("momentum" in group for group in self._groups) else "betas")

    def get_type(self):
        """[str or None]: "type" of each param group, where a script has put one there."""
        return self._of_groups("type")

    def _of_groups(self, name):
        return [group.get(name, 0.0 if name == "betas" else None) for group in self._groups]

    _groups = property(lambda self: [] if self.optimizer is None else self.optimizer.param_groups)

    # --- precision ---

    def loss_scale(self):
        """float: the present factor of the loss; 1.0 except under fp16."""
        return self.core.loss_scale

    def get_wall_clock_timers(self):
        """{name: mean milliseconds} of ``timers``."""
        return self.timers.get_mean(list(self.timers.get_timers()), reset=False)

    def collect_python_gc(self):
        """int: unreachable objects that Python's garbage collector found now."""
        return gc.collect()

    # --- ranks ---

    seq_dp_world_size = property(attrgetter("world_size"), doc="int: the number of ranks.")
    seq_parallel_group = property(
        lambda self: self.sequence and self.sequence.group, doc="ProcessGroup that shares rows; None: there is none.")
    sequence_parallel_size = property(
        lambda self: 1 if self.sequence is None else self.sequence.size, doc="int: ranks that share rows.")
    dp_world_size = property(
        lambda self: self.world_size // self.sequence_parallel_size, doc="int: ranks, or groups, with own rows.")

    @property
    def local_rank(self):
        """int: this process's number on its host, from the launcher (LOCAL_RANK); without it the index of its device,
        or its rank."""
        if "LOCAL_RANK" in os.environ:
            return int(os.environ["LOCAL_RANK"])
        return self.global_rank if self.device.index is None else self.device.index

    def get_data_parallel_rank(self):
        """int: this process's rank."""
        return self.global_rank

    # --- calls that the engine does not need ---

    def allreduce_gradients(self, bucket_size=None):
        """Does nothing: the engine reduces gradients during backward, or, after ``no_sync()``, in a later step."""

    def empty_partition_cache(self):
        """Frees the memory of gathered parameters that are not in use. Collective where gathers are. The configuration
        bounds gathered parameters at all times (``stage3_max_live_parameters``, ``strata.max_live_bytes``)."""
        self.core.free_gathered()

    # --- reports ---

    def memory_report(self):
        """{(tier, kind): (bytes held, peak bytes)}; kind "total" sums a tier."""
        return self.core.memory_report()

    def memory_forecast(self, tier="device"):
        """{kind: bytes, "total": bytes}: what the engine will hold at most on this rank's device, by
        ``memory_report()``'s kinds of the tier "device", once it has trained for some steps. ``tier="host"``: what it
        will hold of host memory for what is offloaded, staged, loaded and saved; ``tier="nvme"``: of drives. The
        numbers mean the same as those of ``strata.memory_forecast``. Takes milliseconds, and is not collective: any
        rank may call it alone."""
        return self.core.memory_forecast(tier)

    def record_steps(self, on=True):
        """Switches on (or off) the timing of steps that begin after this call, by the device's clock, for
        ``step_report()``. The device does not wait for the host; each step records some more events."""
        self.core.record_steps(on)

    def step_report(self, wait=True):
        """The report of this rank's last step, a dict; None before the first is over. docs/OBSERVING.md has its keys;
        sizes are bytes, times seconds, rates GB/s. A value that is not known is None; so are all times but ``seconds``
        and those of drives, unless the step was timed (``record_steps``, ``strata.trace``).

        With ``wait`` the call waits until the device has finished the last step. With offloading the first such call
        takes some tenths of a second more, to measure the links' limits. With ``wait=False`` the report is of the last
        finished step; None if there is none."""
        return self.core.step_report(wait)

    def print_step_report(self):
        """``step_report()`` as a table, on standard error, with ``memory_forecast()`` beside the held bytes."""
        report = self.step_report()
        if report is None:
            return
        forecast = self.memory_forecast()
        for kind, entry in report["device_memory"].items():
            entry["forecast_bytes"] = forecast[kind]
        from .views.tables import step_tables  # only when it is used

        step_tables(report).print()

    # --- torch.compile ---

    def compile(self, backend=None, compile_kwargs=None, schedule=None, compiled_autograd_enabled=False,
                regional=True):  # fmt: skip
        """Compiles each block in place, as ``block.compile()`` does, at its first call, and so the modules outside of
        blocks that own parameters. The losses equal those of the model that is not compiled, where the backend's
        kernels round in the same way.

        The engine's hooks stay out of graphs. At every stage each block is a graph, or several where its code breaks
        it; ``fullgraph`` then says where. Modules that are compiled already stay so, and all stay compiled when the
        engine is destroyed. With ``strata.cuda_graphs`` inductor's mode is "reduce-overhead" unless ``compile_kwargs``
        has a mode or options. UsageError for CUDA graphs without that key, and for ``fullgraph`` where the model is
        compiled from its root; NotImplementedError for ``schedule`` and ``compiled_autograd_enabled``.

        Args:
            backend: of torch.compile, a name or a function. None: "inductor".
            compile_kwargs: dict, more arguments of torch.compile.
            schedule: None; Strata does not offer DeepCompile's passes.
            compiled_autograd_enabled: False; compiled autograd cannot trace the engine's hooks, which are C++.
            regional: False compiles the module from its root, as ``engine.module.compile()`` does; so does True where
                the model has no blocks. Graphs then end at each module that the engine gathers.
        """
        if schedule is not None:
            raise NotImplementedError("engine.compile: DeepCompile's passes are not offered; leave schedule out")
        if compiled_autograd_enabled:
            raise NotImplementedError("engine.compile: compiled autograd cannot trace the engine's hooks; leave "
                                      "compiled_autograd_enabled out")
        arguments = {**(compile_kwargs or {}), "backend": backend or "inductor"}  # the other argument counts
        cuda_graphs = self._config.cuda_graphs
        if cuda_graphs and arguments["backend"] == "inductor" and not arguments.keys() & {"mode", "options"}:
            arguments["mode"] = "reduce-overhead"
        regions = regions_of(self._scope_modules) if regional else []
        if arguments.get("fullgraph") and not regions:
            raise _C.UsageError("engine.compile: the engine's hooks run between graphs, so a model without blocks, or "
                                "with regional=False, is more than one; leave fullgraph out")
        modules, compiler = regions or [self.module], compiler_of(torch.compile(len, **arguments))
        for module in modules:
            require_compilable("", module, compiler, self._cut, cuda_graphs)
        for module in modules:
            if module._compiled_call_impl is None:
                module.compile(**arguments)
        self.is_compiled = True
