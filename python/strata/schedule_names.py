"""Attributes of DeepSpeed's schedules that scripts read, beside the rates."""

import json


def settings_of_schedule(config):
    """{name: value}: "type" and ``scheduler.params`` of a _C.Config, defaults included."""
    lines = (line.split(" = ", 1) for line in config.digest().splitlines() if line.startswith("scheduler."))
    return {name.rpartition(".")[2]: json.loads(text) for name, text in lines}


class ScheduleNames:
    """The settings of a schedule as attributes. The schedule has ``optimizer``, ``get_lr()`` and
    ``last_batch_iteration``.

    Attributes:
        min_lrs, max_lrs: [float], by param group; of WarmupLR, WarmupDecayLR and OneCycle.
        min_lr: [float], by param group; of LRRangeTest.
        org_lrs: [float], by param group: the optimizer's rates before the schedule; of WarmupCosineLR.
        min_moms, max_moms: [(float, float)] betas, by param group; of OneCycle with momentum.
        warmup_num_steps, warmup_type, total_num_steps, warmup_min_ratio, cos_min_ratio, step_size, step_rate,
            staircase, total_size, step_ratio, first_stair_count, second_stair_count, decay_step_size, decay_lr_rate,
            decay_mom_rate, cycle_momentum: the effective values.
    """

    def _tell_of(self, settings, groups):
        def by_group(name, otherwise=None):
            value = settings.get(name)
            if value is None:
                value = otherwise
            return list(value) if isinstance(value, (list, tuple)) else [value] * len(groups)

        rates = [float(group["lr"]) for group in groups]
        if "warmup_num_steps" in settings:
            self.warmup_num_steps = max(2, settings["warmup_num_steps"])
            self.warmup_type = settings["warmup_type"]
            self.total_num_steps = settings.get("total_num_steps")
        if "cos_min_ratio" in settings:
            self.warmup_min_ratio, self.cos_min_ratio = settings["warmup_min_ratio"], settings["cos_min_ratio"]
            self.org_lrs = rates
        elif "warmup_num_steps" in settings:
            self.min_lrs, self.max_lrs = by_group("warmup_min_lr"), by_group("warmup_max_lr", rates)
            self.delta_lrs = [most - least for least, most in zip(self.min_lrs, self.max_lrs)]
        elif "cycle_min_lr" in settings:
            self._log_cycle(settings, groups, by_group)
        elif "lr_range_test_min_lr" in settings:
            self.min_lr = by_group("lr_range_test_min_lr")
            self.step_size, self.step_rate = settings["lr_range_test_step_size"], settings["lr_range_test_step_rate"]
            self.staircase = settings["lr_range_test_staircase"]

    def _log_cycle(self, settings, groups, by_group):
        first = settings["cycle_first_step_size"]
        second = settings.get("cycle_second_step_size")
        self.min_lrs, self.max_lrs = by_group("cycle_min_lr"), by_group("cycle_max_lr")
        self.total_size = float(first) + float(first if second is None else second)
        self.step_ratio = first / self.total_size
        self.first_stair_count = settings["cycle_first_stair_count"]
        stairs = settings.get("cycle_second_stair_count")
        self.second_stair_count = self.first_stair_count if stairs is None else stairs
        for name in ("decay_step_size", "decay_lr_rate", "decay_mom_rate", "cycle_momentum"):
            setattr(self, name, settings[name])
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
        ratios = (rate / own for rate, own in zip(self.get_lr(), self.org_lrs) if own)
        return next(ratios, 0.0)
