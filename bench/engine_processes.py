"""The processes of one engine: starts them, gives them their turn, collects their answers, and always ends them.

A rank's main function is main(connection, *arguments, place). It answers with pairs (kind, value): kinds agreed on with
its caller, "skipped" with a reason, or "error" with a traceback, which ``run_rank`` sends.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections import namedtuple
from multiprocessing.connection import wait

PAUSE_S = 0.5  # between looks at the clock
PATIENCE_S = 5.0  # how long the others may go on once a rank has failed
STACKS_S = 0.5  # the time to write stacks; only on the way to a failure
STACK_LINES = 40

# Where a rank stands; ``log`` is the file for what its libraries print.
Place = namedtuple("Place", "rank world_size port log")


class Skipped(Exception):
    """The engine cannot run here; says why."""


class Failed(Exception):
    """A rank failed, died or hung; the message has its output."""


class EngineProcesses:
    """The constructor starts one process a rank; ``close`` ends them."""

    def __init__(self, label, main, arguments, world_size, logs, start_method="spawn"):
        self._ranks = []  # (process, connection, log)
        context = multiprocessing.get_context(start_method)
        port = _free_port()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            log = os.path.join(logs, f"{label.replace(' ', '_')}.{rank}.log")
            place = Place(rank, world_size, port, log)
            process = context.Process(target=main, args=(theirs, *arguments, place), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours, log))

    def pids(self):
        return [process.pid for process, _, _ in self._ranks]

    def order(self, order):
        """Sends ``order`` to every rank."""
        for _, connection, _ in self._ranks:
            with contextlib.suppress(OSError):  # a rank that ended is found when it does not answer
                connection.send(order)

    def collect(self, expected, deadline, meanwhile=None):
        """[one answer of every rank]; raises Skipped or Failed.

        Args:
            expected: the kind of answer.
            deadline: in time.monotonic's seconds.
            meanwhile: called while waiting; gives the seconds until it wants to be called again.
        """
        waiting = {connection: index for index, (_, connection, _) in enumerate(self._ranks)}
        answers, failure = {}, None
        pause = meanwhile() if meanwhile else PAUSE_S
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
                raise Failed(failure or self._late(sorted(waiting.values()), expected))
            pause = meanwhile() if meanwhile else PAUSE_S
        if failure:
            raise Failed(failure)
        return [answers[index] for index in range(len(self._ranks))]

    def close(self):
        """Ends every rank, those that hang too."""
        deadline = time.monotonic() + 2.0
        for _, connection, _ in self._ranks:
            connection.close()
        for process, _, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process, _, _ in self._ranks:
            process.join()

    def _late(self, indices, expected):
        """The error text about ranks that hang: the stacks of the first of them."""
        process, _, log = self._ranks[indices[0]]
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return f"ranks {indices} did not come to '{expected}' in time\n{_tail(log, STACK_LINES)}"

    def _receive(self, index):
        process, connection, _ = self._ranks[index]
        try:
            return connection.recv()
        except (EOFError, OSError):
            process.join(5)
            return "died", f"the process ended with code {process.exitcode}"


def run_rank(connection, options, place, work):
    """Runs ``work()`` in the process of a rank, reports its exception, and ends the process.

    Args:
        options: a dict with "device" ("cuda" or "cpu") and "cores", of the whole machine.
    """
    with open(place.log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    try:
        _set_environment(options, place)
        work()
    except EOFError:
        pass  # the parent, which gave the orders, has ended
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # the libraries' own endings wait for peers, which may be gone


def _set_environment(options, place):
    defaults = {
        "OMP_NUM_THREADS": max(1, options["cores"] // place.world_size),
        "DS_ACCELERATOR": options["device"],
        "DS_SKIP_CUDA_CHECK": 1,
        "HF_HUB_OFFLINE": 1,
        "HF_HUB_DISABLE_PROGRESS_BARS": 1,
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, str(value))
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
    )


def _free_port():
    """A free port, below those that the kernel gives to outgoing connections, because it is used later."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _tail(log, lines=12):
    with contextlib.suppress(OSError), open(log) as file:
        return "".join(file.readlines()[-lines:])
    return ""
