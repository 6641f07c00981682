"""Seconds and memory of a rank's phases, measured in the same way for every engine."""

import os
import time
from contextlib import contextmanager

import memory_use
from device_memory import DeviceSampler


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
        self.barrier()
        memory_use.forget_peak()
        self.data_at_start = memory_use.resident_data()
        self.device_at_start = self._sampler.used()
        self.barrier()
        self._sampler.start()
        self._started = time.perf_counter()

    def barrier(self):
        """Waits for this rank's GPU and for all ranks."""
        self._synchronize()
        self._dist.barrier()

    def _synchronize(self):
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    @contextmanager
    def phase(self, kind, name):
        """Times the body of the ``with`` statement.

        Args:
            kind: "load", "initialize" or "step".
            name: the work.
        """
        self.barrier()
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
            "data_ready": memory_use.resident_data(),
            "pss_ready": memory_use.proportional_data(),
            "peak_resident": memory_use.peak_resident(),
        }
