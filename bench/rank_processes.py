"""The ranks of one engine as processes that take orders, so that several engines can run in turns.

Every engine's ranks live until the end of a comparison; between its turns they wait for an order and use no CPU.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback

import memory_use
from contestants import use_cores


class RankProcesses:
    """One contestant on ``world_size`` ranks. The constructor starts them; ``close`` ends them."""

    def __init__(self, contestant, workload, world_size, log_directory):
        self.contestant = contestant
        self.world_size = world_size
        self.steps_done = 0
        self.seconds = []  # of each timed step, of its slowest rank
        self.losses = []  # [step][rank]
        self.memory = {}
        self._ranks = []
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            log = os.path.join(log_directory, f"{contestant.label.replace(' ', '_')}.{rank}.log")
            arguments = (theirs, contestant, workload, rank, world_size, port, log)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine, log))
        self.description = self._answers()[0]

    def run(self, steps, timed):
        """Runs ``steps`` steps; the first of a turn is not timed, since other engines' data is in the caches."""
        self._order(("steps", self.steps_done, steps))
        answers = self._answers()
        self.steps_done += steps
        if timed:
            slowest = [max(times) for times in zip(*(seconds for seconds, _ in answers))]
            self.seconds.extend(slowest[1:])
        self.losses.extend(zip(*(losses for _, losses in answers)))

    def measure_memory(self, steps=2, interval_s=0.004):
        """Runs ``steps`` steps that are not timed, and keeps the largest rank's figures in ``memory``."""
        self._order(("peak", self.steps_done, steps))
        pids = [process.pid for process, _, _ in self._ranks]
        data = [0] * len(pids)
        while not any(connection.poll(0) for _, connection, _ in self._ranks):
            with contextlib.suppress(OSError):
                data = [max(most, memory_use.proportional_data(pid)) for most, pid in zip(data, pids)]
            time.sleep(interval_s)
        answers = self._answers()
        self.steps_done += steps
        self.losses.extend(zip(*(answer["losses"] for answer in answers)))
        self.memory = {
            "peak_resident": max(answer["peak_resident"] for answer in answers),
            "data": max(data),
            "engine_data": max(most - answer["data_at_start"] for most, answer in zip(data, answers)),
            "held": max((answer["held"] for answer in answers if answer["held"] is not None), default=None),
        }

    def close(self):
        """Asks the ranks to end, and kills those that do not."""
        for _, connection, _ in self._ranks:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process, _, _ in self._ranks:
            process.join(20)
            if process.is_alive():
                process.kill()

    def _order(self, order):
        for _, connection, _ in self._ranks:
            with contextlib.suppress(OSError):  # a rank that ended is found when it does not answer
                connection.send(order)

    def _answers(self):
        answers = []
        for process, connection, log in self._ranks:
            try:
                while not connection.poll(1.0):
                    if not process.is_alive() and not connection.poll(0):
                        raise EOFError
                kind, answer = connection.recv()
            except (EOFError, OSError):
                process.join(5)
                kind, answer = "error", f"the process ended with code {process.exitcode}"
            if kind == "error":
                raise RuntimeError(f"{self.contestant.label}: {answer}\n{_tail(log)}")
            answers.append(answer)
        return answers


def is_installed(package):
    """Whether ``package`` can be imported here."""
    return importlib.util.find_spec(package) is not None


def _rank_main(connection, contestant, workload, rank, world_size, port, log):
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        trainer, start = _prepare(contestant, workload, rank, world_size, port)
        connection.send(("ready", start))
        while (order := connection.recv()) is not None:
            kind, first, steps = order
            if kind == "peak":
                memory_use.forget_peak()
            seconds, losses = _run(trainer, workload, first, steps, rank, world_size)
            if kind == "steps":
                connection.send(("done", (seconds, losses)))
                continue
            answer = {"losses": losses, "peak_resident": memory_use.peak_resident(), "held": trainer.held()}
            connection.send(("done", answer | {"data_at_start": start["data_at_start"]}))
    except EOFError:
        pass  # the parent, which gave the orders, has ended
    except Exception:
        connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # the libraries' own endings wait for peers, which may be gone


def _prepare(contestant, workload, rank, world_size, port):
    threads = use_cores(world_size)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )
    import torch
    import transformers  # noqa: F401  counted at the start, like torch

    torch.set_num_threads(threads)
    if contestant.package != "torch":
        importlib.import_module(contestant.package)
    if contestant.exchanges:
        torch.distributed.init_process_group("gloo")
    started = time.perf_counter()
    data = memory_use.proportional_data()
    trainer = contestant.make(workload, rank, world_size, **contestant.settings)
    return trainer, {"data_at_start": data, "seconds_to_ready": time.perf_counter() - started}


def _run(trainer, workload, first, steps, rank, world_size):
    seconds, losses = [], []
    for step in range(first, first + steps):
        ids = workload.batch(step, rank, world_size)
        started = time.perf_counter()
        losses.append(trainer.step(ids))
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(log, lines=15):
    with contextlib.suppress(OSError), open(log) as file:
        return "".join(file.readlines()[-lines:])
    return ""


def new_log_directory():
    """A directory for the ranks' output; it is kept, so that a failure can be read."""
    return tempfile.mkdtemp(prefix="strata-bench-")
