"""Learning-rate schedules: classes for scripts, and the configuration's schedule, which ``initialize`` returns."""

import copy
import inspect

import torch

from . import _C
from .config_source import read_config, section_of, settings_of
from .ops.elementwise import set_value

# Settings that are attributes of the same name.
_AS_GIVEN = ("warmup_type", "warmup_min_ratio", "cos_min_ratio", "decay_step_size", "decay_lr_rate", "decay_mom_rate",
             "cycle_momentum")


def settings_of_schedule(config):
    """{name: value}: "type" and ``scheduler.params`` of a _C.Config, defaults included."""
    return {name.rpartition(".")[2]: value for name, value in section_of(settings_of(config), "scheduler").items()}


class ScheduledLR:
    """Writes a schedule's rates into the optimizer's param groups; the engine steps it.

    The schedules are DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest, with
    their values. Scripts read their settings as attributes.

    Attributes:
        min_lrs, max_lrs: [float], by param group; of WarmupLR, WarmupDecayLR and OneCycle.
        min_lr: [float], by param group; of LRRangeTest.
        org_lrs: [float], by param group: the optimizer's rates before the schedule; of WarmupCosineLR.
        min_moms, max_moms: [(float, float)] betas, by param group; of OneCycle with momentum.
        warmup_num_steps, warmup_type, total_num_steps, warmup_min_ratio, cos_min_ratio, step_size, step_rate,
            staircase, total_size, step_ratio, first_stair_count, second_stair_count, decay_step_size, decay_lr_rate,
            decay_mom_rate, cycle_momentum: the effective values.
    """

    def __init__(self, config, optimizer):
        config.require_filled_in("scheduler")
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self._set_names(settings_of_schedule(config), groups)
        self._schedule = _C.Scheduler(config, [float(g["lr"]) for g in groups], all("betas" in g for g in groups))
        initial = self._schedule.initial()
        if initial is not None:
            self._write(initial)

    def step(self, last_batch_iteration=None):
        """Advances by one step, or to ``last_batch_iteration``."""
        schedule = self._schedule
        self._write(schedule.step() if last_batch_iteration is None else schedule.step_to(last_batch_iteration))

    def get_lr(self):
        """[float]: the schedule's present rate of each param group."""
        return self._schedule.current()[0]

    def get_last_lr(self):
        """[float]: the rate that was last written into each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    last_batch_iteration = property(
        lambda self: self._schedule.last_iteration, doc="int: the schedule's present step; -1 before the first.")

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

    def _set_names(self, settings, groups):
        def by_group(name, otherwise=None):
            value = otherwise if settings.get(name) is None else settings[name]
            return list(value) if isinstance(value, (list, tuple)) else [value] * len(groups)

        vars(self).update((name, settings[name]) for name in _AS_GIVEN if name in settings)
        vars(self).update((name, settings[f"lr_range_test_{name}"]) for name in ("step_size", "step_rate", "staircase")
                          if f"lr_range_test_{name}" in settings)
        rates = [float(group["lr"]) for group in groups]
        if "warmup_num_steps" in settings:
            self.warmup_num_steps = max(2, settings["warmup_num_steps"])
            self.total_num_steps = settings.get("total_num_steps")
        if "cos_min_ratio" in settings:
            self.org_lrs = rates
        elif "warmup_num_steps" in settings:
            self.min_lrs, self.max_lrs = by_group("warmup_min_lr"), by_group("warmup_max_lr", rates)
            self.delta_lrs = [most - least for least, most in zip(self.min_lrs, self.max_lrs)]
        elif "lr_range_test_min_lr" in settings:
            self.min_lr = by_group("lr_range_test_min_lr")
        elif "cycle_min_lr" in settings:
            self.min_lrs, self.max_lrs = by_group("cycle_min_lr"), by_group("cycle_max_lr")
            first, second = settings["cycle_first_step_size"], settings.get("cycle_second_step_size")
            self.total_size = float(first) + float(first if second is None else second)
            self.step_ratio = first / self.total_size
            self.first_stair_count = settings["cycle_first_stair_count"]
            stairs = settings.get("cycle_second_stair_count")
            self.second_stair_count = self.first_stair_count if stairs is None else stairs
            if self.cycle_momentum and all("betas" in group for group in groups):
                self.min_moms, self.max_moms = (
                    [(momentum, 0.99) for momentum in by_group(name)]  # DeepSpeed's second beta
                    for name in ("cycle_min_mom", "cycle_max_mom"))

    def get_mom(self):
        """[(float, float)]: the schedule's present betas of each param group; before its first step the largest ones,
        as in DeepSpeed. None where it changes none."""
        return self._schedule.current()[1] if self.last_batch_iteration >= 0 else getattr(self, "max_moms", None)

    def get_lr_ratio(self):
        """float, of WarmupCosineLR: the present rate divided by the optimizer's own; 0.0 before the schedule's first
        step."""
        if self.last_batch_iteration < 0:
            return 0.0
        return next((rate / own for rate, own in zip(self.get_lr(), self.org_lrs) if own), 0.0)


def _set_betas(group, values):
    for old, new in zip(group["betas"], values):
        if isinstance(old, torch.Tensor):
            old.fill_(new)
    if not any(isinstance(old, torch.Tensor) for old in group["betas"]):
        group["betas"] = values


class Advance:
    """One step of a scheduler, which can be taken back. On a GPU the engine steps the scheduler before the host knows
    whether the device skipped the update, since the script reads the new rates at once. ``scheduler`` has
    ``step(**arguments)``, and writes into the param groups of ``optimizer``; without a ``state_dict()`` only its rates
    are taken back. With ``can_be_undone=False`` ``undo()`` does not work."""

    def __init__(self, scheduler, optimizer, arguments, can_be_undone):
        self.can_be_undone = can_be_undone
        if not can_be_undone:
            scheduler.step(**arguments)
            return
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None
        before = [{k: _kept(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
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


def _kept(value):
    """The present value: schedulers change rates that are tensors in place."""
    return value.clone() if hasattr(value, "clone") else value


def _same(a, b):
    return type(a) is type(b) and bool(a == b)


def _schedule(name, base, text, *required, **optional):
    """A class of schedules, of the name that the configuration uses. The constructor takes the optimizer, then the
    configuration's settings. Its errors: ConfigError."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each, kind) for each in ("self", "optimizer", *required)]
    parameters += [inspect.Parameter(each, kind, default=value) for each, value in optional.items()]
    parameters.append(inspect.Parameter("last_batch_iteration", kind, default=-1))
    signature = inspect.Signature(parameters)

    def __init__(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        schedule, optimizer = given.arguments.pop("self"), given.arguments.pop("optimizer")
        section = {"type": schedule.type, "params": dict(given.arguments)}
        ScheduledLR.__init__(schedule, read_config({"scheduler": section}), optimizer)

    __init__.__signature__ = signature
    return type(name, (base,), {"__doc__": text, "__module__": __name__, "type": name, "__init__": __init__})


WarmupLR = _schedule(
    "WarmupLR", ScheduledLR, "From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the optimizer's rate), then constant. "
    "A rate is a number, or a list of one a param group.",
    warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log")
WarmupDecayLR = _schedule(
    "WarmupDecayLR", WarmupLR, "``WarmupLR``, then linearly to 0 at ``total_num_steps``.", "total_num_steps",
    warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log")
WarmupCosineLR = _schedule(
    "WarmupCosineLR", ScheduledLR, "From ``warmup_min_ratio`` of the optimizer's rate to all of it, then by a cosine "
    "to ``cos_min_ratio`` of it.", "total_num_steps",
    warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log")
OneCycle = _schedule(
    "OneCycle", ScheduledLR, "Up from ``cycle_min_lr`` to ``cycle_max_lr`` and down again, then decaying; beta1 the "
    "other way round.", "cycle_min_lr", "cycle_max_lr",
    decay_lr_rate=0.0, cycle_first_step_size=2000, cycle_second_step_size=None, cycle_first_stair_count=0,
    cycle_second_stair_count=None, decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8, cycle_max_mom=0.9,
    decay_mom_rate=0.0)
LRRangeTest = _schedule(
    "LRRangeTest", ScheduledLR, "Up from ``lr_range_test_min_lr``, to find the rate at which training becomes "
    "unstable.",
    lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0, lr_range_test_staircase=False)


def schedule_from_config(config, optimizer):
    """The schedule that a _C.Config names, an instance of its class, over a ``ShardedOptimizer``."""
    name = settings_of_schedule(config)["type"]
    found = next(c for c in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest) if c.type == name)
    schedule = found.__new__(found)
    ScheduledLR.__init__(schedule, config, optimizer)
    return schedule
