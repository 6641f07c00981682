"""The turn of one engine that starts up, and the memory of its ranks as measured from outside."""

import contextlib
import time

import memory_use
from engine_processes import EngineProcesses
from rank import LIMIT, rank_main

SAMPLE_S = 0.01


class Ranks(EngineProcesses):
    """One engine's processes. The constructor starts them, and they import; ``run`` gives them their turn;
    ``close`` always ends them."""

    def __init__(self, label, name, options, world_size, logs):
        super().__init__(label, rank_main, (name, options), world_size, logs)
        self._name = name

    def wait_for_imports(self, deadline_s):
        """Raises Skipped or Failed; else the engine may have its turn."""
        self.collect("imported", time.monotonic() + deadline_s)

    def run(self, deadline_s, changes):
        """Starts the engine on all ranks, with the options of before except ``changes``.

        Returns:
            [the report of each rank]: the dicts of "ready" and "done" in one, with "data_peak": the most bytes of data
            seen until it was ready. For the limit, its measurements.
        """
        deadline = time.monotonic() + deadline_s
        self.order(changes)
        self.collect("started", deadline)
        if self._name == LIMIT:
            return self.collect("done", deadline)
        peaks = [0] * len(self.pids())
        told = self.collect("ready", deadline, lambda: self._sample(peaks))
        done = self.collect("done", deadline)
        return [r | d | {"data_peak": max(p, r["data_ready"])} for r, d, p in zip(told, done, peaks)]

    def _sample(self, peaks):
        """Takes memory into ``peaks``; the seconds until the next time."""
        for index, pid in enumerate(self.pids()):
            with contextlib.suppress(OSError):
                peaks[index] = max(peaks[index], memory_use.resident_data(pid))
        return SAMPLE_S
