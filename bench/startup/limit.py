"""The limit of the hardware: all ranks together read the checkpoint's bytes once, put them on the GPUs, and gather
them.

Rank r of N reads the r-th part of the files from the page cache, in threads, into pinned pieces, and copies them to its
place in a flat buffer on its GPU; an all-gather in place makes the buffer whole on every GPU. Memory is allocated
before the clock starts. On the CPU the files are read straight into the buffer. The timed loop is C++ (load_loop.cpp),
because Python's lock would be the limit otherwise.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

LIBRARY = "startup_limit.so"
PIECES = (1 << 20, 2 << 20)  # that a thread reads at once: two of each thread's together fit the last cache
WARMING_PIECE = 8 << 20
ALIGNMENT = 1 << 20
MAX_GATHER = 1 << 30  # bytes a rank gives in one collective


def find_library():
    """The path of load_loop.cpp as it was built; None where it was not."""
    beside = Path(__file__).resolve().parents[2] / "build" / "python" / "pkg"
    return next((path for folder in (*sys.path, beside) if (path := Path(folder or ".") / LIBRARY).is_file()), None)


def warm_page_cache(folder, threads):
    """Reads every file once, so that all engines find it in memory. (bytes, seconds)."""
    started = time.perf_counter()
    pieces, sizes = [], {path: path.stat().st_size for path in _files(folder)}
    for path, size in sizes.items():
        pieces += [(path, at) for at in range(0, size, WARMING_PIECE)]

    def read():
        scratch = bytearray(WARMING_PIECE)
        while pieces:
            try:
                path, at = pieces.pop()
            except IndexError:
                return
            with open(path, "rb", buffering=0) as file:
                file.seek(at)
                file.readinto(scratch)

    readers = [threading.Thread(target=read) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(sizes.values()), time.perf_counter() - started


def _files(folder):
    found = sorted(Path(folder).glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{folder}: no *.safetensors files")
    return found


class LoadLoop:
    """The timed loop, with ``threads`` that read ``piece`` bytes at once; a context manager.

    Args:
        paths: the files, read as if they lay one behind the other.
        gpu: the index of this rank's, or None.
    """

    def __init__(self, library, paths, gpu, threads, piece):
        self._calls = ctypes.CDLL(os.fspath(library))
        self._calls.strata_load_loop_open.restype = ctypes.c_void_p
        self._calls.strata_load_loop_error.restype = ctypes.c_char_p
        self._calls.strata_load_loop_pass.restype = ctypes.c_double
        names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        index = -1 if gpu is None else gpu
        opened = self._calls.strata_load_loop_open(names, len(paths), index, threads, ctypes.c_int64(piece))
        self._loop = ctypes.c_void_p(opened)

    def __enter__(self):
        try:
            self._check()
        except OSError:
            self._close()
            raise
        return self

    def __exit__(self, kind, value, traceback):
        self._close()
        return False

    def _close(self):
        self._calls.strata_load_loop_close(self._loop)

    def move(self, first, end, target, read, copy):
        """Seconds in which bytes [first, end) of the files came to the address ``target``; either half may be
        left out."""
        range_ = ctypes.c_int64(first), ctypes.c_int64(end), ctypes.c_void_p(target)
        seconds = self._calls.strata_load_loop_pass(self._loop, *range_, int(read), int(copy))
        self._check()
        return seconds

    def _check(self):
        if error := self._calls.strata_load_loop_error(self._loop):
            raise OSError(error.decode())


class Limit:
    """One rank's part of the measurement. Collective."""

    def __init__(self, context):
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._context = torch, dist, context
        self._library = find_library()
        if self._library is None:
            raise FileNotFoundError(f"{LIBRARY} is not on Python's path: build the preset 'python', or pass --no-limit")
        self._paths = _files(context.model)
        self._size = sum(path.stat().st_size for path in self._paths)
        self._world, rank = context.world_size, context.rank
        step = self._world * ALIGNMENT
        self._share = (self._size + step - 1) // step * ALIGNMENT
        self._first = min(rank * self._share, self._size)
        self._end = min(self._first + self._share, self._size)
        self._flat = torch.zeros(self._share * self._world, dtype=torch.uint8, device=context.device)

    def measure(self, repetitions=3):
        """{"bytes", "threads", and lists of seconds}: read, copy, load (both, one under the other), gather. Each loop
        with all of a rank's cores, and with three of four."""
        cores = max(1, min(16, self._context.cores // self._world))
        result = {"bytes": self._size, "threads": cores, "read_s": [], "copy_s": [], "load_s": [], "gather_s": []}
        gpu = self._context.device.index if self._context.on_gpu else None
        for threads in sorted({cores, max(1, cores * 3 // 4)}):
            for piece in PIECES:
                with LoadLoop(self._library, self._paths, gpu, threads, piece) as loop:
                    result["read_s"] += self._moves(loop, 2, read=True, copy=False)
                    if gpu is not None:
                        result["copy_s"] += self._moves(loop, 2, read=False, copy=True)
                    result["load_s"] += self._moves(loop, repetitions, read=True, copy=True)
        if self._world > 1:
            result["gather_s"] = [self._timed_gather() for _ in range(repetitions)]
        return result

    def _moves(self, loop, repetitions, read, copy):
        seconds = []
        for _ in range(repetitions):
            self._context.barrier()
            seconds.append(loop.move(self._first, self._end, self._flat[self._first :].data_ptr(), read, copy))
        return seconds

    def _timed_gather(self):
        self._context.barrier()
        started = time.perf_counter()
        self._gather()
        if self._context.on_gpu:
            self._torch.cuda.synchronize()
        return time.perf_counter() - started

    def _gather(self):
        """In place, in one collective where the backend takes any size, else piece by piece of every share."""
        words = self._flat.view(self._torch.int32)
        each = self._share // 4
        rank = self._context.rank
        if self._context.on_gpu:
            self._dist.all_gather_into_tensor(words, words[rank * each : (rank + 1) * each])
            return
        shares = words.view(self._world, each)
        for at in range(0, each, MAX_GATHER // 4):
            into = [shares[other, at : at + MAX_GATHER // 4] for other in range(self._world)]
            self._dist.all_gather(into, into[rank].clone())
