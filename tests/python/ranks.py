"""Runs a function of a test on several ranks, each a process of its own.

Ranks are forked from one server process that has imported torch and the package under test, so a job
starts in a fraction of a second. Every job gets new processes: nothing of one test is left for the next.
"""

import atexit
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from devices import ON_GPU, gpus, prepare_rank, skip_without_gpus

# Modules that most ranks import. Strata's modules start nothing when they are imported.
PRELOADED = [
    "torch", "torch.distributed", "transformers.modeling_utils", "pytest", "ranks", "comparison", "strata.start",
    "strata.ops.adam", "strata.pretrained", "strata.tiles.cutting", "strata.utils", "strata.views.start_up",
    "strata.views.tables", "strata.zero",
]  # fmt: skip
# Further modules, for ranks without a GPU: beside one, torch's start CUDA when they are imported, and a forked process
# cannot use it then. They are what a rank imports when it compiles its first graph.
PRELOADED_WITHOUT_GPUS = [
    "hf_models", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor.debug",
    "torch._inductor.pattern_matcher", "torch.distributed.tensor.experimental",
]  # fmt: skip
PATIENCE_S = 3.0  # how long the others may go on once a rank has failed
_PR_SET_PDEATHSIG = 1

_context = None


class RankFailure(AssertionError):
    """A rank hung, or ended without an answer, or raised an error that cannot be pickled."""


def run_ranks(world, function, *args, timeout=120.0, may_die=(), env=None, alone=False):
    """[result of ``function(*args)`` on rank 0, 1, ...], called once on each of ``world`` processes.

    The environment is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Where a
    rank raises, its exception is raised here, with its traceback and the tail of its output as notes. The
    processes are gone when this returns, however it returns.

    Args:
        world: number of ranks.
        function: of a module's top level; ``args`` and the result are pickled.
        timeout: seconds for all of it.
        may_die: ranks that may end without an answer; theirs is None.
        env: more environment variables for the ranks.
        alone: no ranks of another test, in any process, run meanwhile on this machine's GPUs.

    Raises:
        RankFailure: a rank hung or died; says which, and where it stood.
        pytest.skip.Exception: where the ranks would have to share GPUs.
    """
    skip_without_gpus(world)
    with gpus(alone), tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(world, function, args, Path(folder), env or {})
        try:
            job.collect(time.monotonic() + timeout, frozenset(may_die))
            return job.results(timeout, frozenset(may_die))
        finally:
            job.end()


class _Job:
    """The processes of one call, and their answers so far."""

    def __init__(self, world, function, args, folder, env):
        self._name = function.__name__
        self._folder = folder
        self._answers = {}  # rank -> ("result" | "error" | "died", value)
        self._killed = []
        self._ranks, self._pipes = [], {}
        environment = {**env, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        task = pickle.dumps((function, args))
        context = _server()
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            process = context.Process(
                target=_rank_main, args=(theirs, task, own, str(self._log(rank))), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes[ours] = rank

    def _log(self, rank):
        return self._folder / f"rank{rank}.log"

    def collect(self, deadline, may_die):
        """Waits for every rank's answer, not much longer than the first failure."""
        waiting = dict(self._pipes)
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._killed = sorted(waiting.values())
                self._dump_stacks()
                return
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    self._answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._ranks[rank].join(5)
                    self._answers[rank] = ("died", self._ranks[rank].exitcode)
                kind = self._answers[rank][0]
                if kind == "error" or (kind == "died" and rank not in may_die):
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        for process in self._ranks:  # they leave together: their exit hooks wait for each other
            process.join(max(0.1, deadline - time.monotonic()))

    def results(self, timeout, may_die):
        """The results, or the first failure as an exception."""
        errors = {r: value for r, (kind, value) in sorted(self._answers.items()) if kind == "error"}
        died = {r: v for r, (kind, v) in sorted(self._answers.items()) if kind == "died" and r not in may_die}
        if errors:
            error = next(iter(errors.values()))[0]
            if hasattr(error, "add_note"):  # from Python 3.11 on
                for other, (_, text) in errors.items():
                    error.add_note(f"rank {other} of '{self._name}':\n{text}")
            raise error
        if died:
            said = ", ".join(f"rank {r} ended with exit code {code}" for r, code in died.items())
            raise RankFailure(f"'{self._name}': {said}, without an answer\n{self._tails(died)}")
        if self._killed:
            raise RankFailure(
                f"'{self._name}': ranks {self._killed} did not answer within {timeout} s\n{self._tails(self._killed)}"
            )
        stuck = [r for r, p in enumerate(self._ranks) if p.exitcode is None]
        if stuck:
            self._dump_stacks()
            raise RankFailure(f"'{self._name}': ranks {stuck} answered, but did not end\n{self._tails(stuck)}")
        return [self._answers[r][1] if self._answers[r][0] == "result" else None for r in range(len(self._ranks))]

    def _dump_stacks(self):
        for process in self._ranks:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the time to write them; only on the way to a failure

    def _tails(self, ranks):
        return "\n".join(f"--- output of rank {r}:\n{_tail(self._log(r))}" for r in ranks)

    def end(self):
        """Leaves no process behind."""
        for process in self._ranks:
            if process.exitcode is None:
                process.kill()
        for process in self._ranks:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _server():
    """The multiprocessing context whose server has imported torch, started at the first call."""
    global _context
    if _context is None:
        changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            _context = multiprocessing.get_context("forkserver")
            _context.set_forkserver_preload(PRELOADED + ([] if ON_GPU else PRELOADED_WITHOUT_GPUS))
            multiprocessing.forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return _context


def _rank_main(pipe, task, environment, log):
    with suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    try:
        prepare_rank()
        function, args = pickle.loads(task)
        answer = pickle.dumps(("result", function(*args)))
    except BaseException as error:  # also SystemExit and pytest's own, which are no Exceptions
        sys.last_value = error
        answer = _error_answer(error)
    pipe.send_bytes(answer)
    atexit._run_exitfuncs()
    with suppress(Exception):
        _close_group()
    sys.stdout.flush()
    os._exit(0)


def _close_group():
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _error_answer(error):
    text = traceback.format_exc()
    try:
        answer = pickle.dumps(("error", (error, text)))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(("error", (RankFailure(f"{type(error).__name__}: {error}"), text)))
    return answer


def _tail(path, size=6000):
    return path.read_text(errors="replace")[-size:] if path.exists() else "(nothing)"


def free_port():
    """A port without a listener, below those that the kernel gives to outgoing connections. Each worker of one run of
    pytest has a range of its own, and takes a port of it once only: a rank listens only some time later."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 15000 + worker % 17 * 1000
    while True:
        port = first + next(_PORTS) % 1000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_PORTS = itertools.count(random.SystemRandom().randrange(1000))
