"""AdamW on the host: Strata's kernel and optimizer, torch's fused one and DeepSpeed's CPUAdam, in elements a second.

    python bench/bench_adam.py [--ranks 1 2] [--threads 1 2] [--numel 8388608] [--rounds 5] [--json FILE] \
        [--program BENCH_KERNELS]

Every rank updates one fp32 array, far larger than the caches, again and again. The contestants take turns. Each figure
is that of the fastest update of all turns, added up over the ranks; the triad is the best STREAM triad that ran between
them (a = b + s * c, on the same number of threads). Every update needs 28 bytes an element: gradient, weight and two
moments read, the last three written. Ranks are processes that work at the same time, each on cores of its own, one for
each thread. The program bench_kernels measures Strata's kernel and the triad; the others run in processes of their own.
"Strata's optimizer" is a step of strata.ops.adam.DeepSpeedCPUAdam. DeepSpeed's operator is compiled when it is first
loaded; if that fails, it is left out, and named.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native_programs

BYTES_AN_ELEMENT = 28
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def cores_of_ranks(ranks, threads):
    """[cores of rank 0, of rank 1, ...], or None where there are too few: of one memory node each, where it has as
    many, and no two hardware threads of a core before every core has one."""
    allowed = sorted(os.sched_getaffinity(0), key=lambda core: (_node(core), core))
    share = len(allowed) // ranks
    if threads > share:
        return None
    return [sorted(allowed[rank * share : rank * share + threads]) for rank in range(ranks)]


def _node(core):
    nodes = Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")
    return next((int(node.name[4:]) for node in nodes), 0)


class Updater:
    """An optimizer in a process of its own, that measures on order. Starts at once; ``error`` waits for it."""

    def __init__(self, make, cores, numel):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, make, cores, numel)
        self._process = context.Process(target=_updater, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def error(self):
        """Why it cannot be measured, or None."""
        return self._connection.recv()

    def begin(self, updates):
        self._connection.send(updates)

    def fastest(self):
        """Seconds of the fastest update since ``begin``."""
        return self._connection.recv()

    def close(self):
        self._connection.send(0)
        self._process.join()


def _updater(connection, make, cores, numel):
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch

    torch.set_num_threads(len(cores))
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


def strata_optimizer(parameters):
    """strata.ops.adam.DeepSpeedCPUAdam."""
    from strata.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, **ADAM)


def torch_fused(parameters):
    """torch.optim.AdamW(fused=True)."""
    import torch

    return torch.optim.AdamW(parameters, fused=True, **ADAM)


def deepspeed_cpu_adam(parameters):
    """deepspeed.ops.adam.DeepSpeedCPUAdam."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **ADAM)


CONTESTANTS = {
    "Strata's optimizer": ("strata", strata_optimizer),
    "torch fused": ("torch", torch_fused),
    "DeepSpeed CPUAdam": ("deepspeed", deepspeed_cpu_adam),
}


def start_updaters(cores, numel, skipped):
    """{name: [Updater of rank 0, ...]} of those that can be measured; the others go to ``skipped`` with the reason."""
    updaters = {}
    for name, (package, make) in CONTESTANTS.items():
        if importlib.util.find_spec(package):
            updaters[name] = [Updater(make, of_rank, numel) for of_rank in cores]
        else:
            skipped[name] = f"{package} is not installed"
    for name, of_ranks in list(updaters.items()):
        errors = [error for error in [updater.error() for updater in of_ranks] if error]
        if errors:
            skipped[name] = errors[0]
            del updaters[name]
    return updaters


def measure(cores, numel, rounds, updates, program, skipped):
    """Elements per second by name, and the triad's bytes per second, summed over all ranks."""
    threads = len(cores[0])
    updaters = start_updaters(cores, numel, skipped)
    rates = dict.fromkeys(["Strata", *updaters], 0.0)
    triad = 0.0
    pattern = f"^adam_step/threads:{threads}/"
    for _ in range(rounds):
        with ThreadPoolExecutor(len(cores)) as pool:
            runs = [pool.submit(native_programs.run_kernels, program, pattern, numel, 0.3, threads, of_rank)
                    for of_rank in cores]  # fmt: skip
            cases = [case for run in runs for case in run.result().values()]
        rates["Strata"] = max(rates["Strata"], sum(case["elements/s"] for case in cases))
        triad = max(triad, sum(case["triad_GB/s"] for case in cases) * 1e9)
        for name, of_ranks in updaters.items():
            for updater in of_ranks:
                updater.begin(updates)
            rates[name] = max(rates[name], sum(numel / updater.fastest() for updater in of_ranks))
    for of_ranks in updaters.values():
        for updater in of_ranks:
            updater.close()
    return rates, triad


def rows_of(cores, rates, triad):
    """A row for each; `ours` is Strata's rate over that one's."""
    return [
        {
            "ranks": len(cores),
            "threads": len(cores[0]),
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
    for heading in ("ranks", "threads", "kernel", "G elements/s", "Strata's rate over it", "of triad", "triad GB/s"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for row in rows:
        table.add_row(
            str(row["ranks"]),
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="processes that update at the same time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a rank")
    parser.add_argument("--numel", type=int, default=1 << 23, help="of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="a turn")
    parser.add_argument("--json", help="where the figures go, besides the table")
    parser.add_argument("--program", help="bench_kernels, where it was built elsewhere")
    arguments = parser.parse_args()
    program = arguments.program or native_programs.build("bench_kernels")
    rows, skipped = [], {}
    for ranks in arguments.ranks:
        for threads in arguments.threads:
            cores = cores_of_ranks(ranks, threads)
            if cores is None:
                skipped[f"{ranks} ranks of {threads} threads"] = f"{len(os.sched_getaffinity(0))} cores"
                continue
            figures = measure(cores, arguments.numel, arguments.rounds, arguments.updates, program, skipped)
            rows += rows_of(cores, *figures)
    report(rows, skipped)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"rows": rows, "skipped": skipped}, file, indent=2)


if __name__ == "__main__":
    main()
