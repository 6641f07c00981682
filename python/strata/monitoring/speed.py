"""The speed of a rank: samples, tokens and operations a second, by the host's clock over several steps."""

import time

import torch


def tokens_of(args, kwargs):
    """int: the tokens of a model's inputs, padding among them: the elements of ``input_ids``, else of the first tensor
    of integers that has a sequence; 0: there is none."""
    inputs = kwargs.get("input_ids")
    if inputs is None and args and isinstance(args[0], dict):
        inputs = args[0].get("input_ids")
    for value in (inputs, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and not value.is_floating_point():
            return value.numel()
    return 0


class Speed:
    """Counts steps after the first one, which takes longer than others. ``line()`` returns their speed, and restarts
    the count."""

    def __init__(self, world_size):
        self._world_size = world_size
        self._since = None
        self._samples = self._tokens = self._flops = 0

    def step_ended(self, samples, tokens, flops):
        """``samples`` of all ranks, ``tokens`` and ``flops`` of this one, None where they are not known."""
        if self._since is None:
            self._since = time.perf_counter()
            return
        self._samples += samples
        self._tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops

    def line(self):
        """str, such as "512.0 samples/s, 65.5 k tokens/s, 12.3 TFLOP/s a rank"; "" before the second step ends."""
        now = time.perf_counter()
        seconds = 0.0 if self._since is None or not self._samples else now - self._since
        parts = []
        if seconds > 0.0:
            parts.append(f"{self._samples / seconds:.1f} samples/s")
            if self._tokens:
                parts.append(f"{amount(self._tokens * self._world_size / seconds)}tokens/s")
            if self._flops:
                parts.append(f"{amount(self._flops / seconds)}FLOP/s a rank")
            self._since = now
            self._samples = self._tokens = self._flops = 0
        return ", ".join(parts)


def amount(number):
    """"65.5 k", "1.2 M", "12 ": a number of three digits, to stand before its unit."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} " if number >= 100 else f"{number:.3g} "


def memory_text(device):
    """str: torch's memory of this rank's GPU, or the process's memory of the host."""
    gib = 2**30
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return f"memory of the device {now / gib:.2f} GiB, at the peak {peak / gib:.2f} GiB"
    import resource

    return f"memory of the process {_resident() / gib:.2f} GiB, at the peak " \
           f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / gib:.2f} GiB"


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
