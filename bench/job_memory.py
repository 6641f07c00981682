"""Memory of a job as seen from outside: of a process and its descendants, and of GPUs."""

import os
import threading
import time

import memory_use
from device_memory import DeviceSampler

SAMPLE_S = 0.02
LOOK_S = 0.3  # for new processes


class JobMemory:
    """Samples memory while the context is open; the job must begin within it.

    Args:
        gpus: the number of GPUs that it uses, from the first on; memory in use before does not count.

    Attributes:
        largest: peak bytes of data of the largest process.
        together: peak bytes of data of all processes at one time; shared memory counts in each.
        device: peak bytes of the fullest GPU; 0 without GPUs.
    """

    def __init__(self, gpus=0):
        self._pid = None
        self.largest = self.together = self.device = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._gpus = []
        if gpus:
            import torch

            self._gpus = [DeviceSampler(torch.device("cuda", index)) for index in range(gpus)]

    def __enter__(self):
        for gpu in self._gpus:
            gpu.start()
        self._before = [gpu.take() for gpu in self._gpus]
        return self

    def watch(self, pid):
        """Starts to watch the job whose first process is ``pid``. Call it once."""
        self._pid = pid
        self._thread.start()

    def __exit__(self, kind, value, traceback):
        self._end.set()
        if self._pid is not None:
            self._thread.join()
        for gpu in self._gpus:
            gpu.stop()
        peaks = (gpu.take() - before for gpu, before in zip(self._gpus, self._before))
        self.device = max(peaks, default=0)
        return False

    def _watch(self):
        looked, pids = 0.0, []
        while not self._end.wait(SAMPLE_S):
            if time.monotonic() - looked > LOOK_S:
                looked, pids = time.monotonic(), family(self._pid)
            sizes = [size for pid in pids if (size := _data(pid))]
            self.largest = max(self.largest, *sizes, 0)
            self.together = max(self.together, sum(sizes))


def family(pid):
    """[int]: ``pid`` and the processes that descend from it."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it has ended


def _data(pid):
    try:
        return memory_use.resident_data(pid)
    except OSError:
        return 0
