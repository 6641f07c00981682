"""A head and its loss, forward and backward of hidden states and weight, at a vocabulary and a number of tokens.

    python bench/bench_loss.py [--widths 1024 4096] [--rounds 9] [--json FILE]

*strata*: ``strata.nn.linear_cross_entropy``. *liger*: Liger's fused kernel, where it can be imported. *trl*: the head
of TRL's SFT, likewise. *torch*: plain linear and cross_entropy of whole logits in fp32. All train the same bf16 tensors
in one process and take turns; two rounds do not count. Times are medians: between CUDA events on a GPU. *peak*: memory
beyond the inputs. *limit*: the three products that any of them needs, 2 x vocabulary x tokens x width operations each,
at the rate of one large product measured in the same run.

Losses and gradients are those of torch, or it fails: the largest difference is at most 2e-2 of the largest gradient.
One without memory is left out; if that is torch, gradients are compared with strata's.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tables import show

from strata.nn import linear_cross_entropy

MIB = 1 << 20
RELATIVE = 2e-2
UNCOUNTED = 2
PRODUCT = 8192  # rows and columns of the product that gives the rate


def strata_loss(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight, labels)


def torch_loss(hidden, weight, labels):
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def liger_loss():
    """Liger's. ImportError where it is not installed."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: fused(weight, hidden, labels)


def trl_loss():
    """TRL's. ImportError where it is not installed, or has another head."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    def loss(hidden, weight, labels):
        return -_ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
                                              ("log_probs",))[0].mean()  # fmt: skip

    return loss


def contestants(names):
    """{name: function of hidden, weight and labels}; of those that are not here it is printed."""
    found = {}
    for name in names:
        try:
            found[name] = {"strata": lambda: strata_loss, "torch": lambda: torch_loss, "liger": liger_loss,
                           "trl": trl_loss}[name]()  # fmt: skip
        except ImportError as error:
            print(f"skipped: {name}: {error}")
    return found


class Clock:
    """Seconds of a call on a device."""

    def __init__(self, device):
        self._cuda = device.type == "cuda"

    def __call__(self, function):
        if not self._cuda:
            began = time.perf_counter()
            function()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def rate_of_products(clock, device, size, rounds):
    """Operations a second of one large bf16 product."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    seconds = [clock(lambda: a @ b) for _ in range(rounds + UNCOUNTED)][UNCOUNTED:]
    return 2 * size**3 / statistics.median(seconds)


class Case:
    """The tensors of one width."""

    def __init__(self, width, a, device):
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        self.hidden = normal(a.tokens, width).requires_grad_()
        self.weight = normal(a.vocabulary, width).mul_(0.02).requires_grad_()
        self.labels = torch.randint(a.vocabulary, (a.tokens,), device=device, generator=generator)
        self._device = device

    def run(self, function):
        """Forward and backward; the loss."""
        self.hidden.grad = self.weight.grad = None
        loss = function(self.hidden, self.weight, self.labels)
        loss.backward()
        return loss.detach()

    def peak(self, function):
        """Bytes beyond the inputs, gradients included; None on the CPU."""
        if self._device.type != "cuda":
            return None
        self.hidden.grad = self.weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(function)
        return torch.cuda.max_memory_allocated() - before

    def apart(self, function, reference):
        """The larger relative difference of both gradients, and that of the loss."""
        loss = self.run(function).float()
        wanted, gradients = reference
        found = [abs(float(loss / wanted - 1))]
        for got, want in zip((self.hidden.grad, self.weight.grad), gradients):
            # A part of the rows at a time: differences in fp32 of the whole would take more memory than the losses.
            parts = zip(got.split(4096), want.split(4096))
            largest = max(float((x.float() - y.float().to(x.device)).abs().max()) for x, y in parts)
            found.append(largest / float(want.abs().max()))
        return max(found)

    def reference(self, function):
        """(loss, gradients on the host) to compare others with."""
        loss = self.run(function).float()
        return loss, [tensor.grad.cpu() for tensor in (self.hidden, self.weight)]


def those_with_room(case, ways):
    """{name: function} of those that run, in their order; of the others it is printed."""
    found = {}
    for name, function in ways.items():
        try:
            case.run(function)
            found[name] = function
        except torch.OutOfMemoryError as error:
            print(f"{name}: out of memory: {str(error).splitlines()[0]}")
            case.hidden.grad = case.weight.grad = None
            torch.cuda.empty_cache()
    return found


def compare(width, ways, a, device, clock, rate):
    """{name: figures} of one width, and its limit in seconds."""
    case = Case(width, a, device)
    running = those_with_room(case, ways)
    first = "torch" if "torch" in running else next(iter(running))
    reference = case.reference(running[first])
    figures = {name: {"apart": case.apart(function, reference), "peak": case.peak(function)}
               for name, function in running.items()}  # fmt: skip
    taken = {name: [] for name in running}
    for turn in range(a.rounds + UNCOUNTED):
        for name, function in running.items():
            case.hidden.grad = case.weight.grad = None
            seconds = clock(lambda function=function: case.run(function))
            if turn >= UNCOUNTED:
                taken[name].append(seconds)
    for name, seconds in taken.items():
        figures[name] |= {"median": statistics.median(seconds), "least": min(seconds)}
    return figures, 3 * 2 * a.vocabulary * a.tokens * width / rate


def print_table(width, figures, limit):
    rows = [[f"width {width}", "ms", "fastest", "of the limit", "of torch", "peak MiB", "difference"]]
    for name, of in figures.items():
        plain = figures.get("torch", {}).get("median")
        rows.append([name, f"{1e3 * of['median']:.2f}", f"{1e3 * of['least']:.2f}", f"{of['median'] / limit:.2f}",
                     f"{of['median'] / plain:.2f}" if plain else "", f"{(of['peak'] or 0) / MIB:,.0f}",
                     f"{of['apart']:.1e}"])  # fmt: skip
    show([*rows, ["limit", f"{1e3 * limit:.2f}", "", "1.00", *[""] * 3]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["strata", "liger", "trl", "torch"]
    parser.add_argument("--contestants", nargs="+", choices=names, default=names)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--product", type=int, default=PRODUCT, help="rows and columns of the product for the rate")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--json", type=Path, help="where the figures go, after every width")
    a = parser.parse_args()
    device = torch.device(a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ways, clock, told, good = contestants(a.contestants), Clock(device), {}, True
    rate = rate_of_products(clock, device, a.product, a.rounds)
    print(f"one product of {a.product} x {a.product}: {rate / 1e12:.2f} TFLOP/s")
    for width in a.widths:
        figures, limit = compare(width, ways, a, device, clock, rate)
        told[width] = {"limit": limit, "of": figures}
        print_table(width, figures, limit)
        wrong = [name for name, of in figures.items() if not of["apart"] <= RELATIVE]
        if wrong:
            print(f"FAILED: gradients of {', '.join(wrong)} are another's", flush=True)
        good = good and not wrong
        if a.json:
            a.json.write_text(json.dumps({"arguments": vars(a), "rate": rate, "widths": told}, indent=1, default=str))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
