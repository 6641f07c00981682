"""The cost of tiles: step time against tile size for one large linear layer and for the experts of a Qwen3-MoE layer,
and peak memory and time of a head with its loss.

    torchrun --nproc-per-node 2 bench/bench_tiles.py [--cases linear experts loss] [--rounds 7] [--ways] [--tiny]

Engines of every tile size train the same module in one process, a step each in turns; a step is forward, backward and
update in bf16. On one rank no data travels, so the remaining cost is that of smaller products. With --ways tiles are
timed in several ways: *own*, as Strata does on this device; *apart*, on one rank, tile by tile, as ranks do that gather
them; *fallback*, tile by tile with the products of devices that neither add 16-bit products to fp32 sums nor have a
grouped product. The loss is measured on rank 0: plain torch with whole logits, ``strata.nn.linear_cross_entropy``, and
Liger's fused kernel if it can be imported. Rank 0 prints a line of JSON for each result: medians, and the fastest. If
there are more ranks than GPUs, they share GPUs by peer copies, and compute in turns there.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
from torch import nn

import strata
from strata.model import tiles as model_tiles
from strata.model.tiles import Tiles
from strata.tiles import functions as tile_functions
from strata.tiles.vocabulary_loss import linear_cross_entropy

MIB = 1 << 20
WAYS = ("own", "apart", "fallback")


class Loss(nn.Module):
    """A module, and a loss of its output."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs).float().square().mean()


def say(**result):
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


def device_of():
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def shares_a_gpu():
    return torch.cuda.is_available() and torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "1"))


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function, device):
    settle(device)
    begin = time.perf_counter()
    function()
    settle(device)
    return time.perf_counter() - begin


def in_turns(functions, rounds, device):
    """{name: seconds of each round} of functions that take turns; the first two rounds do not count."""
    taken = {name: [] for name in functions}
    for turn in range(rounds + 2):
        for name, function in functions.items():
            spent = seconds(function, device)
            if turn >= 2:
                taken[name].append(spent)
    return taken


def engine_of(module, tile_bytes, patterns=()):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    config["strata"] = {"collectives": "peer"} if shares_a_gpu() else {}
    if tile_bytes is not None:
        config["strata"]["tiles"] = {"max_gather": tile_bytes, "match": list(patterns)}
    return strata.initialize(model=Loss(module), config=config)[0]


@contextlib.contextmanager
def in_way(way):
    """Tiles compute in one of WAYS."""
    own = model_tiles.is_widened_by_blas, tile_functions.has_grouped_product, Tiles.runs
    if way != "own":
        Tiles.runs = lambda tiles, dtype=None: list(tiles)
    if way == "fallback":
        model_tiles.is_widened_by_blas = tile_functions.has_grouped_product = lambda *tensors: False
    try:
        yield
    finally:
        model_tiles.is_widened_by_blas, tile_functions.has_grouped_product, Tiles.runs = own


def compare(case, make, inputs, sizes, arguments, device):
    """Prints step times of engines with tiles of ``sizes`` bytes; None is the whole."""

    def step(engine, way):
        with in_way(way):
            engine.backward(engine(*inputs))
            engine.step()

    engines = {size: engine_of(make(), size) for size in sizes}
    ways = [(size, way) for size in sizes for way in (WAYS if arguments.ways and size else WAYS[:1])]
    taken = in_turns({(size, way): (lambda engine=engines[size], way=way: step(engine, way)) for size, way in ways},
                     arguments.rounds, device)  # fmt: skip
    whole = statistics.median(taken[None, "own"])
    for (size, way), times in taken.items():
        say(case=case, tile_mib=None if size is None else size / MIB, way=None if size is None else way,
            world=engines[size].world_size, median_ms=1e3 * statistics.median(times), least_ms=1e3 * min(times),
            of_whole=statistics.median(times) / whole)  # fmt: skip
    for engine in engines.values():
        engine.destroy()


def linear(arguments, device):
    width, tokens = (256, 64) if arguments.tiny else (16384, 8192)
    sizes = [None, *((width * width // parts * 2) for parts in (2, 8, 32))]  # 256, 64, 16 MiB
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    compare("linear", lambda: nn.Linear(width, width, bias=False, device=device), (x,), sizes, arguments, device)


def experts(arguments, device):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, width, inner, tokens = (8, 32, 16, 64) if arguments.tiny else (128, 2048, 768, 8192)
    config = Qwen3MoeConfig(num_experts=count, hidden_size=width, moe_intermediate_size=inner)
    config._experts_implementation = "eager" if device.type == "cpu" else "grouped_mm"
    expert = 2 * inner * width * 2
    sizes = [None, *(expert * each for each in ((4, 2, 1) if arguments.tiny else (42, 10, 2)))]  # 252, 60, 12 MiB
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    scores = torch.randn(tokens, count, device=device, generator=generator).softmax(-1)
    weights, chosen = scores.topk(8 if not arguments.tiny else 2, -1)

    def make():
        module = Qwen3MoeExperts(config).to(device)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        return module

    compare("experts", make, (x, chosen, weights.bfloat16()), sizes, arguments, device)


def loss(arguments, device):
    vocabulary, width, tokens = (1000, 32, 64) if arguments.tiny else (151936, 4096, 8192)
    head = nn.Linear(width, vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def plain():
        nn.functional.cross_entropy(head(hidden).float(), labels).backward()

    def ours():
        linear_cross_entropy(hidden, head, labels).backward()

    ways = {"plain torch": plain, "strata": ours}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        ways["liger"] = lambda: fused(head.weight, hidden, labels).backward()
    except ImportError as error:
        say(case="loss", way="liger", left_out=str(error))
    for name, way in list(ways.items()):
        try:
            measure_loss(name, way, head, hidden, arguments.rounds, device)
        except torch.OutOfMemoryError as error:
            say(case="loss", way=name, out_of_memory=str(error).splitlines()[0])


def measure_loss(name, way, head, hidden, rounds, device):
    def once():
        head.weight.grad = hidden.grad = None
        way()

    once()
    settle(device)
    peak = None
    if device.type == "cuda":
        head.weight.grad = hidden.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once()
        settle(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    taken = [seconds(once, device) for _ in range(rounds)]
    say(case="loss", way=name, median_ms=1e3 * statistics.median(taken), least_ms=1e3 * min(taken), peak_bytes=peak)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["linear", "experts", "loss"],
                        choices=["linear", "experts", "loss"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes at once: a test of this program")
    arguments = parser.parse_args()
    device = device_of()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for case in arguments.cases:
        if case != "loss" or int(os.environ.get("RANK", "0")) == 0:
            {"linear": linear, "experts": experts, "loss": loss}[case](arguments, device)


if __name__ == "__main__":
    main()
