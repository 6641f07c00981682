"""Seconds and memory of a rank's phases, taken alike for every engine."""

import os
import threading
import time
from contextlib import contextmanager

import memory_use


class DeviceSampler:
    """The most bytes of the rank's GPU in use as the driver tells it, whoever uses them; zeros on the CPU.

    A thread asks every few milliseconds. ``longest_gap_s`` says how well it could: it starves while a library
    holds Python's lock.
    """

    def __init__(self, device, interval_s=0.004):
        self._device = device
        self._interval_s = interval_s
        self._peak = 0
        self.longest_gap_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self):
        self._peak = self.used()
        if self._device.type == "cuda":
            self._thread.start()

    def used(self):
        """Bytes in use now."""
        if self._device.type != "cuda":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def take(self):
        """The peak since the last call."""
        used = self.used()
        peak, self._peak = max(self._peak, used), used
        return peak

    def _watch(self):
        last = time.perf_counter()
        while not self._end.wait(self._interval_s):
            self._peak = max(self._peak, self.used())
            now = time.perf_counter()
            self.longest_gap_s, last = max(self.longest_gap_s, now - last), now

    def stop(self):
        self._end.set()


class Clock:
    """Times phases; all ranks enter a phase together. Made when a rank is prepared: memory at the start is
    taken here."""

    def __init__(self, device):
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._device = device
        self._sampler = DeviceSampler(device)
        self.phases = []
        self.meet()
        memory_use.forget_peak()
        self.data_at_start = memory_use.proportional_data()
        self.device_at_start = self._sampler.used()
        self.meet()
        self._sampler.start()
        self._started = time.perf_counter()

    def meet(self):
        """Waits for this rank's GPU and for all ranks."""
        self._synchronize()
        self._dist.barrier()

    def _synchronize(self):
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    @contextmanager
    def phase(self, kind, name):
        """Times what is done within.

        Args:
            kind: "load", "initialize" or "step".
            name: what is done.
        """
        self.meet()
        self._sampler.take()
        cpu_before, before = os.times(), time.perf_counter()
        yield
        self._synchronize()
        seconds, cpu = time.perf_counter() - before, os.times()
        self.phases.append({
            "kind": kind,
            "name": name,
            "seconds": seconds,
            "cpu_seconds": cpu.user + cpu.system - cpu_before.user - cpu_before.system,
            "device_peak": self._sampler.take(),
        })

    def ready(self):
        """The figures until now, when the engine could train. Stays to time steps."""
        self._synchronize()
        seconds = time.perf_counter() - self._started
        return {
            "seconds": seconds,
            "device_at_start": self.device_at_start,
            "device_peak": max((p["device_peak"] for p in self.phases), default=self.device_at_start),
            "device_ready": self._sampler.used(),
            "longest_sample_gap_s": self._sampler.longest_gap_s,
            "data_at_start": self.data_at_start,
            "data_ready": memory_use.proportional_data(),
            "peak_resident": memory_use.peak_resident(),
        }
