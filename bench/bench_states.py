"""A step of 10^9 bf16 parameters on one GPU, with states in 8 bits and in fp32: Strata, bitsandbytes and torch.

    python bench/bench_states.py [--numel 1000000000] [--rounds 9] [--json FILE]

*step*: median wall time of the optimizer's ``step()``, the GPU idle before and after. *kernels*: of its kernels on the
GPU, added up. *bytes*: that one element must move: gradient, weight, remainder of the master, states. *limit*: those
bytes at the bandwidth of the same run, by copies of 4 GiB. Strata holds gradients in fp32 and exact masters; "rounded"
has ``bf16_master_weights_and_grads``: weights without masters, as the others have. bitsandbytes is left
out where it cannot be imported. Memory: of states by the ledger, which must be as the forecast says.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tables import show

import strata

SIDE = 8192
UNCOUNTED = 3
LR = 1e-4
GRADIENT, WEIGHT, REMAINDER = 4, 4, 4.125  # read; read and written; a bit for each element is read, and seldom written
CODES = 2 * (1 + 4 / 256)  # of one moment, read and written
ROUNDED = {"bf16_master_weights_and_grads": True}
# (optimizer, section bf16, bytes)
STRATA = {
    "AdamW8bit": ("AdamW8bit", {}, GRADIENT + WEIGHT + REMAINDER + 2 * CODES),
    "Lion8bit": ("Lion8bit", {}, GRADIENT + WEIGHT + REMAINDER + CODES),
    "AdamW8bit, rounded": ("AdamW8bit", ROUNDED, 2 + WEIGHT + 2 * CODES),
    "Lion8bit, rounded": ("Lion8bit", ROUNDED, 2 + WEIGHT + CODES),
    "AdamW": ("AdamW", {}, GRADIENT + WEIGHT + REMAINDER + 16),
    "Lion": ("Lion", {}, GRADIENT + WEIGHT + REMAINDER + 8),
}
OTHERS = {
    "bitsandbytes AdamW8bit": ("AdamW8bit", 2 + WEIGHT + 2 * CODES),
    "bitsandbytes Lion8bit": ("Lion8bit", 2 + WEIGHT + CODES),
    "torch AdamW, fused": (None, 2 + WEIGHT + 8),
}


class Weights(torch.nn.Module):
    """Square matrices, whose gradients are given."""

    def __init__(self, count, device):
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        args = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.weights = torch.nn.ParameterList(0.02 * torch.randn(SIDE, SIDE, **args) for _ in range(count))
        self.gradients = [1e-3 * torch.randn(SIDE, SIDE, **args) for _ in range(count)]

    def forward(self):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, self.gradients))


class Ours:
    def __init__(self, name, count, device):
        optimizer, bf16, self.bytes = STRATA[name]
        self._model = Weights(count, device)
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True} | bf16,
                  "optimizer": {"type": optimizer, "params": {"lr": LR}},
                  "zero_optimization": {"stage": 1}}  # fmt: skip
        self._engine = strata.initialize(model=self._model, config=config)[0]
        self._states = self._engine.memory_forecast("device")["optimizer state"]

    def prepare(self):
        self._engine.backward(self._engine())

    def step(self):
        self._engine.step()

    def close(self):
        held = self._engine.memory_report()["device", "optimizer state"][1]
        weights = self._engine.module.weights
        finite = all(torch.isfinite(weight).all() for weight in weights)
        self._engine.destroy()
        if held != self._states or not finite:
            sys.exit(f"the ledger has {held} bytes of states, the forecast {self._states}; all finite: {finite}")
        return held


class Theirs:
    def __init__(self, name, count, device):
        optimizer, self.bytes = OTHERS[name]
        self._model = Weights(count, device)
        if optimizer is None:
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)
        else:
            import bitsandbytes

            self._optimizer = getattr(bitsandbytes.optim, optimizer)(self._model.parameters(), lr=LR)

    def prepare(self):
        for weight, gradient in zip(self._model.weights, self._model.gradients):
            weight.grad = gradient

    def step(self):
        self._optimizer.step()

    def close(self):
        of_each = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in of_each if isinstance(value, torch.Tensor) and value.numel() > 256)


def timed(function):
    """Seconds, with an idle GPU before and after."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def kernels_of(contestant):
    """({name: seconds} of the kernels of one step)."""
    from torch.profiler import ProfilerActivity, profile

    contestant.prepare()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        contestant.step()
        torch.cuda.synchronize()
    found = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0) + event.time_range.elapsed_us() / 1e6
    return found


def bandwidth(device):
    """Bytes a second that copies read and write."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source)) for _ in range(6))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="contestants of these names, between semicolons")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    device, count = torch.device("cuda"), max(1, round(a.numel / SIDE**2))
    found = {}
    rate = bandwidth(device)
    for name in a.only.split(";") if a.only else [*STRATA, *OTHERS]:
        kind = Ours if name in STRATA else Theirs
        try:
            one = kind(name, count, device)
        except ImportError as error:
            print(f"skipped: {name}: {error}")
            continue
        times = []
        for _ in range(UNCOUNTED + a.rounds):
            one.prepare()
            times.append(timed(one.step))
        kernels = kernels_of(one)
        found[name] = {"step": statistics.median(times[UNCOUNTED:]), "fastest": min(times[UNCOUNTED:]),
                       "kernels": kernels, "bytes": one.bytes, "states": one.close()}  # fmt: skip
        del one
        gc.collect()
        torch.cuda.empty_cache()
    rows = [["", "step ms", "fastest", "kernels ms", "bytes", "limit ms", "of limit", "kernels of limit", "states GiB"]]
    for name, of in found.items():
        limit, kernels = of["bytes"] * count * SIDE**2 / rate, sum(of["kernels"].values())
        label = f"strata {name}" if name in STRATA else name
        times = [1e3 * value for value in (of["step"], of["fastest"], kernels)]
        figures = [*times, of["bytes"], 1e3 * limit, of["step"] / limit, kernels / limit, of["states"] / 2**30]
        rows.append([label, *(f"{figure:.2f}" for figure in figures)])
    show(rows)
    print(f"{count * SIDE**2:,} parameters; {rate / 1e12:.2f} TB/s by copies, {torch.cuda.get_device_name()}")
    for name, of in found.items():
        largest = sorted(of["kernels"].items(), key=lambda one: -one[1])[:3]
        print(name, ", ".join(f"{kernel[:60]} {1e3 * seconds:.2f}" for kernel, seconds in largest))
    if a.json:
        a.json.write_text(json.dumps({"bandwidth": rate, "numel": count * SIDE**2, "found": found}, indent=1))


if __name__ == "__main__":
    main()
