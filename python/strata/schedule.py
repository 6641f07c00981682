"""Learning-rate schedules of the configuration, as the object that ``initialize`` returns."""

from . import _C


class ScheduledLR:
    """Writes the configured schedule's rates into the optimizer's param groups; the engine steps it.

    The schedules are DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest, with
    their values.
    """

    def __init__(self, config, optimizer):
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self._schedule = _C.Scheduler(config, [g["lr"] for g in groups], all("betas" in g for g in groups))
        initial = self._schedule.initial()
        if initial is not None:
            self._write(initial)

    def step(self, last_batch_iteration=None):
        """Goes one step on, or to ``last_batch_iteration``."""
        if last_batch_iteration is None:
            self._write(self._schedule.step())
        else:
            self._write(self._schedule.step_to(last_batch_iteration))

    def get_lr(self):
        """[float]: the rate of each param group where the schedule stands."""
        return self._schedule.current()[0]

    def get_last_lr(self):
        """[float]: the rate of each param group as last written."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        """{"last_batch_iteration": int}."""
        return {"last_batch_iteration": self._schedule.last_iteration}

    def load_state_dict(self, state):
        """Goes to where ``state_dict()`` was taken."""
        self._schedule.last_iteration = state["last_batch_iteration"]

    def _write(self, rates):
        lrs, betas = rates
        for i, group in enumerate(self.optimizer.param_groups):
            group["lr"] = lrs[i]
            if betas is not None:
                group["betas"] = betas[i]
