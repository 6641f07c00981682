"""Learning-rate schedules: classes for scripts, and the configuration's schedule, which ``initialize`` returns."""

import copy

import torch

from . import _C
from .config_source import read_config
from .ops.elementwise import set_value
from .schedule_names import ScheduleNames, settings_of_schedule


class ScheduledLR(ScheduleNames):
    """Writes a schedule's rates into the optimizer's param groups; the engine steps it.

    The schedules are DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest, with
    their values.
    """

    def __init__(self, config, optimizer):
        config.require_filled_in("scheduler")
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self._tell_of(settings_of_schedule(config), groups)
        self._schedule = _C.Scheduler(config, [float(g["lr"]) for g in groups], all("betas" in g for g in groups))
        initial = self._schedule.initial()
        if initial is not None:
            self._write(initial)

    def step(self, last_batch_iteration=None):
        """Advances by one step, or to ``last_batch_iteration``."""
        if last_batch_iteration is None:
            self._write(self._schedule.step())
        else:
            self._write(self._schedule.step_to(last_batch_iteration))

    def get_lr(self):
        """[float]: the schedule's present rate of each param group."""
        return self._schedule.current()[0]

    def get_last_lr(self):
        """[float]: the rate that was last written into each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_batch_iteration(self):
        """int: the schedule's present step; -1 before the first."""
        return self._schedule.last_iteration

    def state_dict(self):
        """{"last_batch_iteration": int}."""
        return {"last_batch_iteration": self._schedule.last_iteration}

    def load_state_dict(self, state):
        """Sets the schedule to the step of ``state``, a result of ``state_dict()``."""
        self._schedule.last_iteration = state["last_batch_iteration"]

    def _write(self, rates):
        lrs, betas = rates
        for i, group in enumerate(self.optimizer.param_groups[: len(lrs)]):  # later ones keep their own
            set_value(group, "lr", lrs[i])
            if betas is not None:
                _set_betas(group, betas[i])


def _set_betas(group, values):
    for old, new in zip(group["betas"], values):
        if isinstance(old, torch.Tensor):
            old.fill_(new)
    if not any(isinstance(old, torch.Tensor) for old in group["betas"]):
        group["betas"] = values


class Advance:
    """One step of a scheduler, which can be taken back.

    On a GPU the engine steps the scheduler before the host knows whether the device skipped the update, since the
    script reads the new rates at once.

    Args:
        scheduler: an object with ``step()``; without a ``state_dict()`` only its rates are taken back.
        optimizer: the scheduler writes into its param groups.
        arguments: of the scheduler's ``step()``, a dict.
        can_be_undone: False: ``undo()`` will not be called.
    """

    def __init__(self, scheduler, optimizer, arguments, can_be_undone):
        self.can_be_undone = can_be_undone
        if not can_be_undone:
            scheduler.step(**arguments)
            return
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None
        before = [_settings(group) for group in optimizer.param_groups]
        scheduler.step(**arguments)
        self._written = []  # (group, key, before, after)
        for group, old in zip(optimizer.param_groups, before, strict=True):
            changed = [key for key, value in old.items() if key in group and not _same(group[key], value)]
            self._written += [(group, key, old[key], _kept(group[key])) for key in changed]

    def undo(self):
        """Takes the step back. Values that the script has written into a param group since then stay."""
        if self._state is not None:
            self._scheduler.load_state_dict(self._state)
        for group, key, before, after in self._written:
            if _same(group[key], after):
                set_value(group, key, before)


def _settings(group):
    return {key: _kept(value) for key, value in group.items() if key != "params"}


def _kept(value):
    """The present value: schedulers change rates that are tensors in place."""
    return value.clone() if hasattr(value, "clone") else value


def _same(a, b):
    return type(a) is type(b) and bool(a == b)


def _start(arguments):
    """Starts a schedule from its constructor's ``arguments``, its ``locals()``. Its class has the name that the
    configuration uses. Errors: ConfigError."""
    schedule, optimizer = arguments.pop("self"), arguments.pop("optimizer")
    section = {"type": schedule.type, "params": arguments}
    ScheduledLR.__init__(schedule, read_config({"scheduler": section}), optimizer)


class WarmupLR(ScheduledLR):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the optimizer's rate), then constant. A rate is a number, or a
    list of one a param group."""

    type = "WarmupLR"

    def __init__(
        self,
        optimizer,
        warmup_min_lr=0.0,
        warmup_max_lr=None,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        _start(locals())


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then linearly to 0 at ``total_num_steps``."""

    type = "WarmupDecayLR"

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_lr=0.0,
        warmup_max_lr=0.001,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        _start(locals())


class WarmupCosineLR(ScheduledLR):
    """From ``warmup_min_ratio`` of the optimizer's rate to all of it, then by a cosine to ``cos_min_ratio`` of it."""

    type = "WarmupCosineLR"

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_ratio=0.0,
        warmup_num_steps=1000,
        cos_min_ratio=0.0001,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        _start(locals())


class OneCycle(ScheduledLR):
    """Up from ``cycle_min_lr`` to ``cycle_max_lr`` and down again, then decaying; beta1 the other way round."""

    type = "OneCycle"

    def __init__(
        self,
        optimizer,
        cycle_min_lr,
        cycle_max_lr,
        decay_lr_rate=0.0,
        cycle_first_step_size=2000,
        cycle_second_step_size=None,
        cycle_first_stair_count=0,
        cycle_second_stair_count=None,
        decay_step_size=0,
        cycle_momentum=True,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.0,
        last_batch_iteration=-1,
    ):
        _start(locals())


class LRRangeTest(ScheduledLR):
    """Up from ``lr_range_test_min_lr``, to find the rate at which training becomes unstable."""

    type = "LRRangeTest"

    def __init__(
        self,
        optimizer,
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
        last_batch_iteration=-1,
    ):
        _start(locals())


def schedule_from_config(config, optimizer):
    """The schedule that a _C.Config names, an instance of its class, over a ``ShardedOptimizer``."""
    name = settings_of_schedule(config)["type"]
    found = next(c for c in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest) if c.type == name)
    schedule = found.__new__(found)
    ScheduledLR.__init__(schedule, config, optimizer)
    return schedule
