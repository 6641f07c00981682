"""Memory of a GPU as its driver tells it."""

import atexit
import threading
import time


class DeviceSampler:
    """The peak of the bytes in use on the rank's GPU, by all processes, as the driver counts them; zeros on the CPU.

    A thread asks every ``interval_s``, which may be changed at any time. ``longest_gap_s`` is the longest time between
    two samples: the thread starves while a library holds Python's lock.
    """

    def __init__(self, device, interval_s=0.004):
        self._device = device
        self._peak = 0
        self.interval_s = interval_s
        self.longest_gap_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self):
        self._peak = self.used()
        if self._device.type == "cuda":
            self._thread.start()
            atexit.register(self.stop)  # a thread that takes Python's lock again after the end would abort the process

    def used(self):
        """Bytes in use now."""
        if self._device.type != "cuda":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def take(self):
        """The peak since the last call."""
        used = self.used()
        peak, self._peak = max(self._peak, used), used
        return peak

    def _watch(self):
        last = time.perf_counter()
        while not self._end.wait(self.interval_s):
            self._peak = max(self._peak, self.used())
            now = time.perf_counter()
            self.longest_gap_s, last = max(self.longest_gap_s, now - last), now

    def stop(self):
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
