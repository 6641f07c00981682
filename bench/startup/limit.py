"""What the hardware allows: the checkpoint's bytes read once by all ranks together, put on the GPUs, and gathered.

Rank r of N reads the r-th part of the files from the page cache, in threads, into pinned pieces, and copies them to
its place in a flat buffer on its GPU; an all-gather in place makes the buffer whole on every GPU. Memory is made
before the clock starts. On the CPU the files are read straight into the buffer.
"""

import os
import threading
import time
from pathlib import Path

PIECES = (8 << 20, 2 << 20)  # that a thread reads at once: small ones stay in the cache, large ones cost fewer calls
PIECE = PIECES[0]
ALIGNMENT = 1 << 20
MAX_GATHER = 1 << 30  # bytes a rank gives in one collective


class FileRange:
    """The bytes of several files, one after another. Threads may read at once."""

    def __init__(self, folder):
        self._files, self.size = [], 0
        for path in sorted(Path(folder).glob("*.safetensors")):
            size = path.stat().st_size
            self._files.append((self.size, self.size + size, os.open(path, os.O_RDONLY)))
            self.size += size
        if not self._files:
            raise FileNotFoundError(f"{folder}: no *.safetensors files")

    def read(self, at, into):
        """Fills the memoryview ``into`` with the bytes from ``at`` on; stops at the end."""
        for first, end, descriptor in self._files:
            while len(into) > 0 and first <= at < end:
                got = os.preadv(descriptor, [into[: end - at]], at - first)
                at, into = at + got, into[got:]

    def close(self):
        for _, _, descriptor in self._files:
            os.close(descriptor)


def warm_page_cache(folder, threads):
    """Reads every file once, so that all engines find it in memory. (bytes, seconds)."""
    files = FileRange(folder)
    started = time.perf_counter()
    scratch = [memoryview(bytearray(PIECE)) for _ in range(threads)]
    _in_threads(threads, 0, files.size, lambda index, at, size: files.read(at, scratch[index][:size]))
    seconds = time.perf_counter() - started
    files.close()
    return files.size, seconds


def _in_threads(threads, first, end, work, piece=PIECE):
    """work(thread, at, bytes) for all pieces of [first, end), as threads become free."""
    lock, at, failures = threading.Lock(), [first], []

    def run(index):
        try:
            while not failures:
                with lock:
                    here = at[0]
                    at[0] += piece
                if here >= end:
                    return
                work(index, here, min(piece, end - here))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


class _Ring:
    """Two pinned pieces of a thread, used in turns, and the stream that empties them."""

    def __init__(self, torch, device):
        self._torch = torch
        self._stream = torch.cuda.Stream(device)
        self._slots = []
        for _ in range(2):
            host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            self._slots.append((host, memoryview(host.numpy()), torch.cuda.Event()))
        self._turn = 0

    def move(self, target, fill, copy):
        """Fills a piece with ``fill`` and copies it to ``target``; either may be left out."""
        host, view, free = self._slots[self._turn]
        self._turn = 1 - self._turn
        free.synchronize()
        if fill is not None:
            fill(view[: target.numel()])
        if copy:
            with self._torch.cuda.stream(self._stream):
                target.copy_(host[: target.numel()], non_blocking=True)
                free.record()


class Limit:
    """One rank's part of the measurement. Collective."""

    def __init__(self, context):
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._context = torch, dist, context
        self._files = FileRange(context.model)
        self._world, rank = context.world_size, context.rank
        step = self._world * ALIGNMENT
        self._share = (self._files.size + step - 1) // step * ALIGNMENT
        self._first = min(rank * self._share, self._files.size)
        self._end = min(self._first + self._share, self._files.size)
        self._flat = torch.zeros(self._share * self._world, dtype=torch.uint8, device=context.device)
        self._threads = max(1, min(16, context.cores // self._world))
        self._rings = [_Ring(torch, context.device) for _ in range(self._threads)] if context.on_gpu else None
        self._host = None if context.on_gpu else memoryview(self._flat.numpy())

    def measure(self, repetitions=3):
        """{"bytes", "threads", and lists of seconds}: read, copy, load (both, one under the other), gather."""
        result = {"bytes": self._files.size, "threads": self._threads}
        result["read_s"] = self._time(2, lambda piece: self._pass(piece, read=True, copy=False))
        result["copy_s"] = self._time(2, lambda piece: self._pass(piece, read=False, copy=True)) if self._rings else []
        result["load_s"] = self._time(repetitions, lambda piece: self._pass(piece, read=True, copy=True))
        result["gather_s"] = self._time(repetitions, lambda _: self._gather(), [None]) if self._world > 1 else []
        self._files.close()
        return result

    def _time(self, repetitions, action, pieces=PIECES):
        seconds = []
        for piece in [piece for piece in pieces for _ in range(repetitions)]:
            self._context.meet()
            started = time.perf_counter()
            action(piece)
            if self._context.on_gpu:
                self._torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds

    def _pass(self, piece, read, copy):
        def work(index, at, size):
            if self._rings is None:
                self._files.read(at, self._host[at : at + size])
                return
            fill = (lambda view: self._files.read(at, view)) if read else None
            self._rings[index].move(self._flat[at : at + size], fill, copy)

        _in_threads(self._threads, self._first, self._end, work, piece)

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
