"""AdamW on the host: Strata's kernel, torch's fused one and DeepSpeed's CPUAdam, in elements a second.

    python bench/bench_adam.py [--threads 1 2] [--numel 8388608] [--rounds 5] [--json FILE]

One fp32 array far larger than the caches, updated again and again. The three take turns, each figure is that of the
fastest update of all turns, and the triad is the best STREAM triad that ran between them (a = b + s * c, on as many
threads). Every update needs 28 bytes an element: gradient, weight and two moments read, the last three written.
Strata's kernel and the triad are measured by the program bench_kernels; the others in processes of their own.
DeepSpeed's operator is compiled when it is first loaded; where that fails it is left out, by name.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time

import native_programs

BYTES_AN_ELEMENT = 28
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


class Updater:
    """An optimizer in a process of its own, that measures on order."""

    def __init__(self, make, threads, numel):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, make, threads, numel)
        self._process = context.Process(target=_updater, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.error = self._connection.recv()

    def fastest(self, updates):
        """Seconds."""
        self._connection.send(updates)
        return self._connection.recv()

    def close(self):
        self._connection.send(0)
        self._process.join()


def _updater(connection, make, threads, numel):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch

    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.full((numel,), 0.02))
    weight.grad = torch.full((numel,), 1e-3)
    try:
        optimizer = make([weight])
        for _ in range(3):
            optimizer.step()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    connection.send(None)
    while updates := connection.recv():
        best = float("inf")
        for _ in range(updates):
            started = time.perf_counter()
            optimizer.step()
            best = min(best, time.perf_counter() - started)
        connection.send(best)


def torch_fused(parameters):
    """torch.optim.AdamW(fused=True)."""
    import torch

    return torch.optim.AdamW(parameters, fused=True, **ADAM)


def deepspeed_cpu_adam(parameters):
    """deepspeed.ops.adam.DeepSpeedCPUAdam."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **ADAM)


def measure(threads, numel, rounds, updates, program, skipped):
    """Elements a second by name, and the triad's bytes a second."""
    makers = {"torch fused": torch_fused}
    if importlib.util.find_spec("deepspeed"):
        makers["DeepSpeed CPUAdam"] = deepspeed_cpu_adam
    else:
        skipped["DeepSpeed CPUAdam"] = "deepspeed is not installed"
    updaters = {name: Updater(make, threads, numel) for name, make in makers.items()}
    for name, updater in list(updaters.items()):
        if updater.error:
            skipped[name] = updater.error
            del updaters[name]
    rates = dict.fromkeys(["Strata", *updaters], 0.0)
    triad = 0.0
    pattern = f"^adam_step/threads:{threads}/"
    for _ in range(rounds):
        (case,) = native_programs.run_kernels(program, pattern, numel, 0.3).values()
        rates["Strata"] = max(rates["Strata"], case["elements/s"])
        triad = max(triad, case["triad_GB/s"] * 1e9)
        for name, updater in updaters.items():
            rates[name] = max(rates[name], numel / updater.fastest(updates))
    for updater in updaters.values():
        updater.close()
    return rates, triad


def rows_of(threads, rates, triad):
    """A row for each; `ours` is Strata's rate over that one's."""
    return [
        {
            "threads": threads,
            "kernel": name,
            "elements_per_s": rate,
            "ours": rates["Strata"] / rate,
            "of_triad": rate * BYTES_AN_ELEMENT / triad,
            "triad_gb_per_s": triad / 1e9,
        }
        for name, rate in rates.items()
    ]


def report(rows, skipped):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="AdamW, fp32")
    for heading in ("threads", "kernel", "G elements/s", "Strata's rate over it", "of triad", "triad GB/s"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for row in rows:
        table.add_row(
            str(row["threads"]),
            row["kernel"],
            f"{row['elements_per_s'] / 1e9:.3f}",
            f"{row['ours']:.2f}",
            f"{row['of_triad']:.2f}",
            f"{row['triad_gb_per_s']:.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"skipped: {name} ({reason})", markup=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="a turn")
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    program = native_programs.build("bench_kernels")
    rows, skipped = [], {}
    for threads in arguments.threads:
        figures = measure(threads, arguments.numel, arguments.rounds, arguments.updates, program, skipped)
        rows += rows_of(threads, *figures)
    report(rows, skipped)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"rows": rows, "skipped": skipped}, file, indent=2)


if __name__ == "__main__":
    main()
