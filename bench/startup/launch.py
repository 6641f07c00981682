"""The processes of one engine, and the memory that they are seen to use from outside."""

import contextlib
import multiprocessing
import os
import random
import socket
import time
from multiprocessing.connection import wait

import memory_use
from rank import LIMIT, rank_main

SAMPLE_S = 0.02
SAMPLE_SHARE = 0.05  # of the time at most: the kernel holds a process's memory map while it counts
PATIENCE_S = 5.0  # how long the others may go on once a rank has failed


class Skipped(Exception):
    """The engine cannot run here; says why."""


class Failed(Exception):
    """A rank failed, died or hung; says what it said."""


class Ranks:
    """One engine's processes. The constructor starts them, and they import; ``run`` gives them their turn;
    ``close`` ends them, whatever they do."""

    def __init__(self, label, name, options, world_size, logs):
        self._name = name
        self._ranks = []  # (process, connection, log)
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            log = os.path.join(logs, f"{label.replace(' ', '_')}.{rank}.log")
            arguments = (theirs, name, options, rank, world_size, port, log)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours, log))

    def wait_for_imports(self, deadline_s):
        """Raises Skipped or Failed; else the engine may have its turn."""
        self._collect("imported", time.monotonic() + deadline_s)

    def run(self, deadline_s, changes):
        """Starts the engine on all ranks, with options as they were but for ``changes``.

        Returns:
            [what a rank told]: the dicts of "ready" and "done" in one, with "data_peak": the most bytes of
            proportional memory seen until it was ready. Of the limit, what it measured.
        """
        deadline = time.monotonic() + deadline_s
        self._order(changes)
        self._collect("started", deadline)
        peaks = [0] * len(self._ranks)
        if self._name == LIMIT:
            return self._collect("done", deadline)
        told = self._collect("ready", deadline, peaks)
        done = self._collect("done", deadline)
        return [r | d | {"data_peak": max(p, r["data_ready"])} for r, d, p in zip(told, done, peaks)]

    def close(self):
        deadline = time.monotonic() + 2.0
        for _, connection, _ in self._ranks:
            connection.close()
        for process, _, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process, _, _ in self._ranks:
            process.join()

    def _order(self, order):
        for _, connection, _ in self._ranks:
            with contextlib.suppress(OSError):  # a rank that ended is found when it does not answer
                connection.send(order)

    def _collect(self, expected, deadline, peaks=None):
        """One answer of every rank; samples memory into ``peaks`` while it waits."""
        waiting = {connection: index for index, (_, connection, _) in enumerate(self._ranks)}
        answers, failure = {}, None
        pause = SAMPLE_S if peaks is not None else 0.5
        while waiting:
            for connection in wait(list(waiting), timeout=max(0.0, min(pause, deadline - time.monotonic()))):
                index = waiting.pop(connection)
                kind, value = self._receive(index)
                if kind == "skipped":
                    raise Skipped(value)
                if kind == expected:
                    answers[index] = value
                elif failure is None:
                    failure = f"rank {index}: {value}\n{_tail(self._ranks[index][2])}"
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
            if waiting and time.monotonic() >= deadline:
                late = f"ranks {sorted(waiting.values())} did not come to '{expected}' in time"
                raise Failed(failure or f"{late}\n{_tail(self._ranks[min(waiting.values())][2])}")
            if peaks is not None:
                pause = max(SAMPLE_S, self._sample(peaks) / SAMPLE_SHARE)
        if failure:
            raise Failed(failure)
        return [answers[index] for index in range(len(self._ranks))]

    def _receive(self, index):
        process, connection, _ = self._ranks[index]
        try:
            return connection.recv()
        except (EOFError, OSError):
            process.join(5)
            return "died", f"the process ended with code {process.exitcode}"

    def _sample(self, peaks):
        started = time.perf_counter()
        for index, (process, _, _) in enumerate(self._ranks):
            with contextlib.suppress(OSError):
                peaks[index] = max(peaks[index], memory_use.proportional_data(process.pid))
        return time.perf_counter() - started


def _free_port():
    """A port that nobody listens on, below those that the kernel gives to outgoing connections: it is used later."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _tail(log, lines=12):
    with contextlib.suppress(OSError), open(log) as file:
        return "".join(file.readlines()[-lines:])
    return ""
