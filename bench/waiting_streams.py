"""How much longer a kernel takes to follow another while other streams of the same GPU wait.

A stream that waits for an event or for a flag has the GPU's scheduler look at it again and again. Strata keeps to
one such stream; this is the measure behind that. Needs one GPU.

    bench/waiting_streams.py
"""

import ctypes
import statistics

import torch

KERNELS = 800  # fewer than a stream's queue holds
REPEATS = 5
HOLD_CYCLES = 12_000_000  # the stream sleeps while the kernels are queued, so that the host's pace does not count


class Flags:
    """Words of pinned host memory that streams wait for."""

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._words = torch.zeros(1024, dtype=torch.int32).pin_memory()

    def wait(self, stream, index):
        """Has ``stream`` wait for word ``index``."""
        address = self._words.data_ptr() + index * self._words.element_size()
        error = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(address), ctypes.c_uint32(1), ctypes.c_uint(0)
        )
        if error:
            raise RuntimeError(f"cuStreamWaitValue32 failed with CUresult {error}")

    def set_all(self, value):
        self._words.fill_(value)


def microseconds_a_kernel(waiting, flags):
    """Median over repeats, while the streams of ``waiting`` wait."""
    values = torch.zeros(1 << 14, device="cuda")
    results = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        flags.set_all(0)
        for index, stream in enumerate(waiting):
            flags.wait(stream, index)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        for _ in range(KERNELS):
            values.add_(1)
        end.record()
        end.synchronize()
        flags.set_all(1)
        torch.cuda.synchronize()
        results.append(begin.elapsed_time(end) * 1e3 / KERNELS)
    return statistics.median(results)


def main():
    if not torch.cuda.is_available():
        raise SystemExit("waiting_streams.py measures a GPU, and torch sees none here")
    flags = Flags()
    microseconds_a_kernel([], flags)  # warms up
    print("streams that wait | of the default priority | of the highest   (us from kernel to kernel)")
    for count in (0, 1, 2, 4):
        row = [
            microseconds_a_kernel([torch.cuda.Stream(priority=priority) for _ in range(count)], flags)
            for priority in (0, -5)
        ]
        print(f"{count:17d} | {row[0]:23.2f} | {row[1]:14.2f}")


if __name__ == "__main__":
    main()
