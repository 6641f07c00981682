"""Rank 0's output about each step: lines of progress and of times, metrics, the profile of one step, and
``deepspeed.comm.log_summary()``."""

import json
import os
import time
import weakref
from contextlib import nullcontext

import torch

from .. import _C
from ..ranks.departure import engines
from ..tiles.host_copy import LateValues
from ..views import logger
from ..views.start_up import host_memory
from ..views.tables import TRANSFERS, transfer_tables
from .flops import PassProfile, amount, profile_text


def tokens_of(args, kwargs):
    """int: the tokens of a model's inputs, padding among them: the elements of ``input_ids``, else of the first tensor
    of integers that has a sequence; 0: there is none."""
    inputs = kwargs.get("input_ids")
    if inputs is None and args and isinstance(args[0], dict):
        inputs = args[0].get("input_ids")
    return next((value.numel() for value in (inputs, *args, *kwargs.values())
                 if isinstance(value, torch.Tensor) and value.dim() >= 2 and not value.is_floating_point()), 0)


def memory_text(device):
    """str: torch's memory of this rank's GPU, or the process's memory of the host."""
    if device.type == "cuda":
        what, now, peak = "device", torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        what, now, peak = "process", *host_memory()
    return f"memory of the {what} {now / 2**30:.2f} GiB, at the peak {peak / 2**30:.2f} GiB"


def log_summary(show_straggler=False, return_dict=False):
    """Logs on rank 0 the transfers of each engine's last step: gathers, reductions and refreshes (lazy all-gathers of
    units that stay whole), with times where steps are timed (``comms_logger.enabled``, or ``engine.record_steps()``).
    With ``return_dict`` returns them, an entry an engine: [{"step", "transfers": as of ``engine.step_report()``}]. With
    ``show_straggler``, collective then, it also logs the shortest wait of a rank, and the sum of the other ranks'
    excess."""
    logged = []
    for engine in engines():
        report = engine.step_report()
        if report is None:
            continue
        transfers = report["transfers"]
        if show_straggler:
            mine = {kind: entry["exposed_seconds"] for kind, entry in transfers.items()}
            ranks = [json.loads(text) for text in engine._collectives.all_gather_text(json.dumps(mine))]
            for kind, entry in transfers.items():
                times = [rank[kind] for rank in ranks]
                known = None not in times
                entry["least_exposed_seconds"] = min(times) if known else None
                entry["straggler_seconds"] = sum(time - min(times) for time in times) if known else None
        logged.append({"step": report["step"], "transfers": transfers})
        if engine.global_rank == 0:
            logger.info("%s", transfer_tables(report["step"], transfers).text())
    return logged if return_dict else None


def transfers_line(transfers):
    """The transfers of a step in one line."""
    parts = []
    for kind, name in TRANSFERS.items():
        entry = transfers[kind]
        if entry["count"]:
            text = f"{entry['count']} {name} of {entry['bytes'] * 1e-9:.3f} GB"
            if entry["gb_per_s"]:
                text += f" at {entry['gb_per_s']:.1f} GB/s"
            parts.append(text if entry["exposed_seconds"] is None
                         else f"{text}, {entry['exposed_seconds'] * 1e3:.1f} ms exposed")
    return "; ".join(parts) or "no transfers"


# {timer: metric}
_TIMERS = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce",
           "step": "step"}


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
        self._shows_speed = bool(self._every and on["timers.throughput.enabled"])
        self._since = None  # (time, samples) from which the next speed counts: not the first step, which takes longer
        self._flops = None  # of a micro-batch
        self._profiles_at = 1 if self._shows_speed and "timers.throughput.enabled" in config.shown_given else None
        if on["flops_profiler.enabled"]:
            self._profiles_at = on["flops_profiler.profile_step"]
        self._profile = None  # while a micro-batch is profiled, and until its step is over
        self._tokens = self._ended = 0
        self._losses = []  # of this step: (LateValues of a loss, its part of the step's)
        self._pending = []  # steps whose metrics are not written, each a _Step
        self._steps = {}  # number of the recorder -> (step, samples), of steps whose times are not there yet
        self._samples = engine.global_samples
        if self._timed:
            engine.record_steps()
            engine.core.keep_step_reports()

    def forward(self, call, args, kwargs):
        """The result of ``call(*args, **kwargs)``, a forward."""
        if self._shows_speed and self._engine.module.training:
            self._tokens += tokens_of(args, kwargs)
        due = self._engine.global_steps == self._profiles_at and self._engine.module.training
        if not due or self._profile is not None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        self._profile = PassProfile(self._engine.module, self._engine.device)
        with self._profile.forward():
            return call(*args, **kwargs)

    def backward(self, loss, scale_wrt_gas):
        if self._monitor.enabled:
            share = 1.0 / self._engine.gradient_accumulation_steps() if scale_wrt_gas else 1.0
            self._losses.append((LateValues(loss.detach().double().mean()), share))
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
        self._samples = samples
        if self._since is None:
            self._since, self._tokens = (time.perf_counter(), samples), 0
        if self._every and step % self._every == 0:
            skipped = engine.core.skipped_steps(wait=False)
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", step, skipped, engine.get_lr(), engine.get_mom())
            speed = self._speed() if self._shows_speed else ""
            if speed:
                logger.info("step %d: %s, %s", step, speed, memory_text(engine.device))
        if self._on["memory_breakdown"]:
            logger.info("step %d: %s", step, memory_text(engine.device))
        if self._monitor.enabled:
            self._record_metrics(samples, applied)
        if self._timed:
            self._steps[self._ended] = (step, samples)
            self._take_times(wait=False)

    def _speed(self):
        """str, such as "512.0 samples/s, 65.54 k tokens/s, 12.31 TFLOP/s a rank"; "" in the first step. Restarts the
        count."""
        now, world_size = time.perf_counter(), self._engine.world_size
        seconds, samples = now - self._since[0], self._samples - self._since[1]
        if not samples:
            return ""
        parts = [f"{samples / seconds:.1f} samples/s"]
        if self._tokens:
            parts.append(f"{amount(self._tokens * world_size / seconds)}tokens/s")
        if self._flops:
            passes = samples / (self._engine.train_micro_batch_size_per_gpu() * world_size)
            parts.append(f"{amount(self._flops * passes / seconds)}FLOP/s a rank")
        self._since, self._tokens = (now, self._samples), 0
        return ", ".join(parts)

    def close(self, wait=True):
        """Shows and writes the remaining values. ``wait``: whether to wait for the device."""
        if self._timed:
            self._take_times(wait)
        if self._pending and wait:
            self._pending[-1].norm = self._engine.core.grad_norm
        self._write_metrics(wait)
        self._monitor.close()

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
        forward, backward = report["forward_seconds"], report["backward_seconds"]
        times = [each * 1e3 for each in (forward, backward, backward - exposed, exposed, report["update_seconds"])]
        for name, milliseconds in zip(_TIMERS, times):
            self._engine.timers(name).add(milliseconds)
        lines = " | ".join(f"{name}: {milliseconds:.2f}" for name, milliseconds in zip(_TIMERS, times))
        logger.info("time (ms) of step %d | %s", step, lines)
        self._monitor.write_events([(f"Train/Samples/elapsed_time_ms_{name}", milliseconds, samples)
                                    for name, milliseconds in zip(_TIMERS.values(), times)])  # fmt: skip

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
            numel = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())  # full sizes of sharded ones
            rows.append((name.split(".")[-1] or "model", type(module).__name__, depth, numel, flops, seconds))
        title = f"Profile of one micro-batch on rank 0, after {step} steps"
        shape = (self._on[f"flops_profiler.{name}"] for name in ("module_depth", "top_modules", "detailed"))
        return profile_text(title, rows, (profile.forward_flops, profile.backward_flops), *shape)


class _Step:
    """One step's metrics; the device may still have to compute some of them."""

    def __init__(self, samples, events, losses, norm):
        self._samples, self._events, self._losses = samples, events, losses
        self.norm = norm  # None: not known

    def ready(self):
        return self.norm is not None and all(value.ready() for value, _ in self._losses)

    def all_events(self):
        loss = sum(float(value.get()) * share for value, share in self._losses)
        events = [("Train/Samples/train_loss", loss, self._samples)] if self._losses else []
        norm = [] if self.norm is None else [("Train/Samples/grad_norm", self.norm, self._samples)]
        return [*events, *self._events, *norm]
