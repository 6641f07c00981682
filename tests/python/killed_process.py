"""Kills a process before one of the system calls that it makes, in any of its threads.

Linux alone: it follows the process with ptrace. The caller must have no threads, since it forks.
"""

import ctypes
import os
import signal
import traceback

SEIZE, INTERRUPT, SYSCALL = 0x4206, 0x4207, 24
# Calls stop with a mark of their own; forks and new threads are followed; the process dies with the tracer.
OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x100000
ALL_THREADS = 0x40000000  # __WALL of waitpid
CALL_STOP = signal.SIGTRAP | 0x80


def run_traced(prepare, write, kill_at=None):
    """Runs ``write(prepare())`` in a forked process, which dies by SIGKILL before the ``kill_at``-th system call that
    its threads make within ``write``.

    Returns:
        the number of calls that began. It is less than ``kill_at`` where the process ended by itself.

    Raises:
        RuntimeError: the process failed by itself.
    """
    ready, set_ready = os.pipe()
    go, set_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(prepare, write, set_ready, go)
    for descriptor in (set_ready, go):
        os.close(descriptor)
    try:
        if not os.read(ready, 1):
            raise RuntimeError(f"the process failed before it wrote: {os.waitpid(pid, 0)[1]}")
        _seize(pid)
        os.write(set_go, b"x")
        return _follow(pid, kill_at)
    finally:
        os.close(ready)
        os.close(set_go)


def _run(prepare, write, set_ready, go):
    status = 1
    try:
        state = prepare()
        os.write(set_ready, b"x")
        os.read(go, 1)
        write(state)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _ptrace(request, thread, data=0):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(request, thread, 0, data) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {request:#x} of thread {thread}")


def _seize(pid):
    """Every thread of the process stops at its next system call from now on."""
    known = set()
    while new := {int(thread) for thread in os.listdir(f"/proc/{pid}/task")} - known:
        for thread in new:
            try:
                _ptrace(SEIZE, thread, OPTIONS)
                _ptrace(INTERRUPT, thread)
            except ProcessLookupError:  # it has ended
                pass
        known |= new


def _follow(pid, kill_at):
    calls, within = 0, {}
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread != pid:
                continue
            if status:
                raise RuntimeError(f"the process failed while it wrote: wait status {status}")
            return calls
        stop, passed_on = os.WSTOPSIG(status), 0
        if stop == CALL_STOP:
            within[thread] = not within.get(thread, False)
            calls += within[thread]
            if within[thread] and calls == kill_at:
                os.kill(pid, signal.SIGKILL)
                while os.waitpid(-1, ALL_THREADS)[0] != pid:
                    pass
                return calls
        elif not status >> 16:  # no event of the tracer's: a signal to the process
            passed_on = stop
        try:
            _ptrace(SYSCALL, thread, passed_on)
        except ProcessLookupError:
            pass
