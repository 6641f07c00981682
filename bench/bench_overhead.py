"""The engine's overhead on one rank against plain torch: with 500 small parameters, work per parameter shows.

    python bench/bench_overhead.py [--widths 64 256 512] [--steps 60] [--threads 1] [--json FILE]

Plain torch with AdamW as torch makes it (foreach), plain torch with fused=True, and Strata train copies of one
model in one process, on one thread, a step each in turns. It compares CPU seconds of whole steps (forward, backward,
clipping and update): the medians, and the fastest steps, which have the least noise from other programs.

By default Strata uses all cores of the rank for host memory, regardless of torch's threads: --threads 0 selects that.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

import strata

ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Block(nn.Module):
    """Ten parameters."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        y = torch.relu(self.between(self.second(torch.relu(self.before(self.first(x))))))
        return x + self.third(y)


class Tower(nn.Module):
    """Fifty blocks: 500 parameters."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(50))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def plain_step(model, batch, fused):
    """A step of plain torch, as a function."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None, **ADAM)

    def step():
        model(batch).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def strata_step(model, batch, threads):
    """A step of the engine, as a function. ``threads``: of its kernels; 0: its own choice."""
    config = {
        "train_micro_batch_size_per_gpu": len(batch),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAM, betas=list(ADAM["betas"]))},
        "strata": {"threads": threads or None},
    }
    engine, *_ = strata.initialize(model=model, config=config)

    def step():
        engine.backward(engine(batch).pow(2).mean())
        engine.step()

    return step


def measure(width, batch_size, steps, threads):
    """CPU seconds of the steps of each, by name."""
    torch.manual_seed(0)
    model = Tower(width)
    batch = torch.randn(batch_size, width)
    contestants = {
        "foreach": plain_step(copy.deepcopy(model), batch, fused=False),
        "fused": plain_step(copy.deepcopy(model), batch, fused=True),
        "strata": strata_step(model, batch, threads),
    }
    for step in contestants.values():
        for _ in range(5):
            step()
    seconds = {name: [] for name in contestants}
    for _ in range(steps):
        for name, step in contestants.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    return seconds


def row_of(width, batch_size, seconds):
    """Medians, minima and their ratios."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = {name: min(values) for name, values in seconds.items()}
    row = {"width": width, "batch": batch_size, "median_s": medians, "fastest_s": fastest}
    for name in ("foreach", "fused"):
        row[f"of_{name}"] = {
            "median": medians["strata"] / medians[name],
            "fastest": fastest["strata"] / fastest[name],
        }
    return row


def report(rows):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one rank, 500 parameters, fp32: CPU milliseconds a step (median, fastest)")
    for heading in ("width", "batch", "torch foreach", "torch fused", "Strata", "of foreach", "of fused"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{row['median_s'][n] * 1e3:.1f}, {row['fastest_s'][n] * 1e3:.1f}" for n in row["median_s"]]
        ratios = [f"{row[of]['median']:.2f}, {row[of]['fastest']:.2f}" for of in ("of_foreach", "of_fused")]
        table.add_row(str(row["width"]), str(row["batch"]), *times, *ratios)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of Strata's kernels; 0: cores of the rank")
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for width in arguments.widths:
        seconds = measure(width, arguments.batch, arguments.steps, arguments.threads)
        rows.append(row_of(width, arguments.batch, seconds))
    report(rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
