"""Rank 0's output about each step: lines of progress and of times, metrics, the profile of one step."""

import json
import logging
import os
import weakref
from contextlib import nullcontext

import torch

from .. import _C
from ..views.flops_view import profile_text
from .speed import Speed, memory_text, tokens_of
from .transfers import transfers_line
from .values import LateValue

logger = logging.getLogger("strata")

_TIMERS = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
_NAMES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


def watch_steps(engine, config, monitor):
    """A ``StepWatch`` where the configuration (a _C.Config) asks for output of this rank; else None."""
    on = {path: json.loads(text) for path, text in config.shown.items()}
    times = on["wall_clock_breakdown"] or on["comms_logger.enabled"]
    shows = config.steps_per_print or monitor.enabled or on["memory_breakdown"] or on["flops_profiler.enabled"]
    if engine.global_rank == 0 and (times or shows):
        return StepWatch(engine, config, on, monitor)
    if on["comms_logger.enabled"]:
        engine.record_steps()  # for log_summary(), which compares ranks
    return None


class StepWatch:
    """The engine of rank 0 calls this at its passes and steps. It waits for the device only in the step that is
    profiled: values that the device has not computed yet are shown with a later step."""

    def __init__(self, engine, config, on, monitor):
        self._engine, self._on, self._monitor = weakref.proxy(engine), on, monitor
        self._every = config.steps_per_print
        self._breakdown = on["wall_clock_breakdown"]
        self._timed = self._breakdown or on["comms_logger.enabled"]
        self._speed = Speed(engine.world_size) if on["timers.throughput.enabled"] and self._every else None
        self._flops = None  # of a micro-batch
        self._profiles_at = self._profile_step(config)
        self._profile = None  # while a micro-batch is profiled, and until its step is over
        self._tokens = self._ended = 0
        self._losses = []  # of this step: (LateValue, its part of the step's loss)
        self._pending = []  # steps whose metrics are not written, each a _Step
        self._steps = {}  # number of the recorder -> (step, samples), of steps whose times are not there yet
        self._samples = engine.global_samples
        if self._timed:
            engine.record_steps()
            engine.core.keep_step_reports()

    def _profile_step(self, config):
        if self._on["flops_profiler.enabled"]:
            return self._on["flops_profiler.profile_step"]
        return 1 if self._speed and "timers.throughput.enabled" in config.shown_given else None

    # --- calls of the engine ---

    def forward(self, call, args, kwargs):
        """The result of ``call(*args, **kwargs)``, a forward."""
        if self._speed and self._engine.module.training:
            self._tokens += tokens_of(args, kwargs)
        due = self._engine.global_steps == self._profiles_at and self._engine.module.training
        if not due or self._profile is not None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        from .flops import PassProfile  # not before a step is profiled

        self._profile = PassProfile(self._engine.module, self._engine.device)
        with self._profile.forward():
            return call(*args, **kwargs)

    def backward(self, loss, scale_wrt_gas):
        """Context of the backward from ``loss``."""
        if self._monitor.enabled:
            share = 1.0 / self._engine.gradient_accumulation_steps() if scale_wrt_gas else 1.0
            self._losses.append((LateValue(loss), share))
        if self._profile is not None and self._profile.forward_flops and self._profile.backward_flops is None:
            return self._profile.backward()
        return nullcontext()

    def step_begins(self):
        """Before each update. The norm of the step before is computed by now, or the engine waits for it next."""
        if self._pending and self._pending[-1].norm is None:
            self._pending[-1].norm = self._engine.core.grad_norm

    def step_ended(self, applied):
        """At each accumulation boundary. ``applied``: whether the weights were updated; None: not known yet."""
        engine = self._engine
        self._ended += 1
        step, samples = engine.global_steps, engine.global_samples
        if self._profiles_at is not None and step > self._profiles_at:
            self._end_profile()
        if self._speed:
            passes = engine.gradient_accumulation_steps()
            self._speed.step_ended(samples - self._samples, self._tokens, self._flops and self._flops * passes)
        self._tokens, self._samples = 0, samples
        if self._every and step % self._every == 0:
            self._show_progress(step)
        if self._on["memory_breakdown"]:
            logger.info("step %d: %s", step, memory_text(engine.device))
        if self._monitor.enabled:
            self._record_metrics(samples, applied)
        if self._timed:
            self._steps[self._ended] = (step, samples)
            self._take_times(wait=False)

    def close(self, wait=True):
        """Shows and writes the remaining values. ``wait``: whether to wait for the device."""
        if self._timed:
            self._take_times(wait)
        if self._pending and wait:
            self._pending[-1].norm = self._engine.core.grad_norm
        self._write_metrics(wait)
        self._monitor.close()

    # --- progress ---

    def _show_progress(self, step):
        engine = self._engine
        skipped = engine.core.skipped_steps(wait=False)
        logger.info("step=%d, skipped=%d, lr=%s, mom=%s", step, skipped, engine.get_lr(), engine.get_mom())
        speed = self._speed.line() if self._speed else ""
        if speed:
            logger.info("step %d: %s, %s", step, speed, memory_text(engine.device))

    # --- metrics ---

    def _record_metrics(self, samples, applied):
        engine = self._engine
        norm = engine.core.known_grad_norm  # if `applied` is None, that of an earlier step
        events = [("Train/Samples/lr", lr, samples) for lr in engine.get_lr()[:1]]
        if engine.fp16_enabled():
            events.append(("Train/Samples/loss_scale", engine.core.loss_scale, samples))
        self._pending.append(_Step(samples, events, self._losses, None if applied is None else norm))
        self._losses = []
        self._write_metrics(wait=False)

    def _write_metrics(self, wait):
        while self._pending and (wait or self._pending[0].ready()):
            self._monitor.write_events(self._pending.pop(0).all_events())

    # --- times ---

    def _take_times(self, wait):
        for report in self._engine.core.take_step_reports(wait):
            step, samples = self._steps.pop(report["step"], (report["step"], self._samples))
            if report["forward_seconds"] is None:
                continue
            if self._on["comms_logger.enabled"] and self._on["comms_logger.verbose"]:
                logger.info("step %d: %s", step, transfers_line(report["transfers"]))
            if self._breakdown:
                self._show_times(step, samples, report)

    def _show_times(self, step, samples, report):
        exposed = report["transfers"]["reduce"]["exposed_seconds"]
        seconds = (report["forward_seconds"], report["backward_seconds"], report["backward_seconds"] - exposed, exposed,
                   report["update_seconds"])
        times = [each * 1e3 for each in seconds]
        for name, milliseconds in zip(_TIMERS, times):
            self._engine.timers(name).add(milliseconds)
        lines = " | ".join(f"{name}: {milliseconds:.2f}" for name, milliseconds in zip(_TIMERS, times))
        logger.info("time (ms) of step %d | %s", step, lines)
        self._monitor.write_events([
            (f"Train/Samples/elapsed_time_ms_{name}", milliseconds, samples)
            for name, milliseconds in zip(_NAMES, times)
        ])

    # --- the profile ---

    def _end_profile(self):
        profile, self._profile = self._profile, None
        step, self._profiles_at = self._profiles_at, None
        if profile is not None:
            self._flops = profile.flops
        if not self._on["flops_profiler.enabled"]:
            return
        if profile is None:
            logger.warning("flops_profiler: no forward by engine(...) was seen after %d steps, so there is no profile",
                           step)
            return
        text = self._profile_text(profile, step)
        path = self._on["flops_profiler.output_file"]
        if path is None:
            logger.info("%s", text)
            return
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            _C.write_file_atomically(path, text + "\n")
        except (OSError, _C.IoError) as error:
            logger.warning("flops_profiler.output_file: '%s' could not be written: %s", path, error)

    def _profile_text(self, profile, step):
        rows = []
        for name, module in self._engine.module.named_modules():
            flops, seconds = profile.modules.get(module, (0, 0.0))
            depth = name.count(".") + 1 if name else 0
            kind = type(module).__name__
            rows.append((name.split(".")[-1] or "model", kind, depth, _numel_of(module), flops, seconds))
        title = f"Profile of one micro-batch on rank 0, after {step} steps"
        shape = (self._on[f"flops_profiler.{name}"] for name in ("module_depth", "top_modules", "detailed"))
        return profile_text(title, rows, (profile.forward_flops, profile.backward_flops), *shape)


def _numel_of(module):
    """int: elements of a module's parameters, with the full sizes of sharded ones."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


class _Step:
    """One step's metrics; the device may still have to compute some of them."""

    def __init__(self, samples, events, losses, norm):
        self._samples, self._events, self._losses = samples, events, losses
        self.norm = norm  # None: not known

    def ready(self):
        return self.norm is not None and all(value.ready() for value, _ in self._losses)

    def all_events(self):
        loss = sum(value.get() * share for value, share in self._losses)
        events = [("Train/Samples/train_loss", loss, self._samples)] if self._losses else []
        norm = [] if self.norm is None else [("Train/Samples/grad_norm", self.norm, self._samples)]
        return [*events, *self._events, *norm]
