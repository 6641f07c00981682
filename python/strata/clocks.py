"""Names of DeepSpeed's engine where scripts look for times: ``timers`` and ``tput_timer``."""

import time

from .model.model_input import device_time


class Timers:
    """``engine.timers``: host clocks by name, for a script's own use, whose starts and stops wait for a torch.device;
    ``engine.step_report()`` has the times of a step. With ``wall_clock_breakdown`` there are "fwd", "bwd", "bwd_inner",
    "bwd_allreduce" and "step" of the steps so far, by the device's clock."""

    def __init__(self, device):
        self._device = device
        self._timers = {}

    def __call__(self, name):
        """The ``Timer`` of this name, made when it is first asked for."""
        if name not in self._timers:
            self._timers[name] = Timer(name, self._device)
        return self._timers[name]

    def has_timer(self, name):
        return name in self._timers

    def get_timers(self):
        """{name: ``Timer``}."""
        return self._timers

    def get_mean(self, names, normalizer=1.0, reset=True):
        """{name: mean milliseconds between start and stop, divided by ``normalizer``} of the timers that ran."""
        means = {name: self._timers[name].mean() / normalizer for name in names if self.has_timer(name)}
        for name in means if reset else ():
            self._timers[name].reset()
        return means

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        """Logs milliseconds, divided by ``normalizer``, of the timers that ran, on ``ranks``; None: on rank 0.
        ``memory_breakdown``: log torch's memory of the device, too."""
        from .monitoring.watching import memory_text  # not in every script
        from .rank_logging import log_dist

        found = [name for name in names if self.has_timer(name)]
        text = "".join(f" | {name}: {self._timers[name].elapsed(reset) / normalizer:.2f}" for name in found)
        if memory_breakdown:
            text += f" | {memory_text(self._device)}"
        log_dist(f"time (ms){text}", ranks or [0])


class Timer:
    """One of ``Timers``. Milliseconds between starts and stops add up until ``reset()``."""

    def __init__(self, name, device):
        self.name_ = name
        self._device = device
        self.started_ = False
        self.reset()

    def start(self):
        if self.started_:
            raise RuntimeError(f"the timer '{self.name_}' has been started; stop() it first")
        self._since = device_time(self._device)
        self.started_ = True

    def stop(self, reset=False, record=True):
        """``reset``: drops the milliseconds of earlier starts. ``record``: accepted for DeepSpeed's sake."""
        if not self.started_:
            raise RuntimeError(f"the timer '{self.name_}' is not running; start() it first")
        if reset:
            self.reset()
        self.add((device_time(self._device) - self._since) * 1e3)
        self.started_ = False

    def add(self, milliseconds):
        """Adds the milliseconds of a start and stop that another clock has measured."""
        self._milliseconds += milliseconds
        self._count += 1

    def reset(self):
        self._milliseconds, self._count = 0.0, 0

    def elapsed(self, reset=True):
        """float: milliseconds so far, also of a start that has no stop yet."""
        now = device_time(self._device) if self.started_ else 0.0
        total = self._milliseconds + (now - self._since) * 1e3 if self.started_ else self._milliseconds
        if reset:
            self.reset()
            self._since = now
        return total

    def mean(self):
        """float: mean milliseconds between start and stop."""
        return self._milliseconds / self._count if self._count else 0.0


class ThroughputTimer:
    """``engine.tput_timer``: samples a second over the optimizer steps since the second one, since the first steps of
    a job take longer. The engine uses the host's clock, and does not wait for the device."""

    start_step = 2

    def __init__(self):
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._since = None

    def step_ended(self, samples):
        """Called by the engine at each accumulation boundary; ``samples``: of all ranks."""
        now = time.perf_counter()
        self.global_step_count += 1
        if self._since is not None:
            self.total_elapsed_time += now - self._since
            self._samples += samples
        if self.global_step_count >= self.start_step:
            self._since = now

    def avg_samples_per_sec(self):
        """float: of all ranks; ``-inf`` before the third step, as DeepSpeed's."""
        return self._samples / self.total_elapsed_time if self.total_elapsed_time else float("-inf")

    def stop(self, global_step=False, report_speed=True):
        """Does nothing: the engine counts, and epochs do not matter for the mean."""

    start = update_epoch_count = stop
